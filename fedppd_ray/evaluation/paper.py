"""The figures that the paper reports (ACML 2023, PMLR 222), and when a run may stand beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedppd_ray.config import Config
from fedppd_ray.config_identity import difference, flatten

# Relative difference in rows a client up to which a run counts as the paper's ("about 2,100 rows" is its word).
_ROWS_TOLERANCE = 0.2

Figures = Mapping[str, float]  # metric → value, in the units of `metrics.Scores`


@dataclass(frozen=True)
class Regime:
    """One of the paper's experiments: what a client held, for how long it ran, and what came out."""

    kinds: tuple[str, ...]  # partition kinds
    major: int | None  # major classes a client, where the partition has such
    rows: int  # rows a client, about
    rounds: int
    ood: str | None
    figures: Mapping[str, Figures]  # method → metric → value
    settings: Mapping[str, object]  # key of the configuration → what the authors had
    own_settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # of single methods


_CLIENTS = 10


def _accuracies(**by_method: float) -> dict[str, Figures]:
    return {method: {"accuracy": value} for method, value in by_method.items()}


def _joined(first: Mapping[str, Figures], second: Mapping[str, Figures]) -> dict[str, Figures]:
    return {method: {**first.get(method, {}), **second.get(method, {})} for method in {**first, **second}}


_SUMMARY = ("ece", "mce", "brier", "ood_auroc", "misclassification_auroc")

_CIFAR10_CALIBRATION: dict[str, Figures] = {
    method: dict(zip(_SUMMARY, values, strict=True))
    for method, values in {
        "fedavg": (16.88, 24.71, 0.60, 0.728, 0.742),
        "fedswag": (16.69, 23.16, 0.60, 0.728, 0.743),
        "fedbe": (19.26, 27.54, 0.59, 0.728, 0.753),
        "fedppd": (4.31, 6.62, 0.50, 0.701, 0.755),
        "fedppd_distill": (10.83, 16.71, 0.49, 0.765, 0.769),
    }.items()
}

# What the authors had everywhere. Only FedPPD's clients read `_SAMPLING`, only a distilling server `_SERVER`.
_LOCAL: dict[str, object] = {
    "client.epochs": 10,
    "client.batch_size": 40,
    "client.rate_decay": 1.0,
    "client.augment": "none",
    "teacher.network": "auto",
    "teacher.pretrained": False,
}
_SAMPLING: dict[str, object] = {
    "teacher.sampler": "sgld",
    "teacher.temperature": "4/N",
    "teacher.prior_precision": "1e-4*N",
    "teacher.send": "last",
    "student.network": "auto",
    "student.pretrained": False,
    "student.weight_decay": 1e-4,
    "student.input_noise": 0.001,
    "student.distill_every": "epoch",
}
_SERVER: dict[str, object] = {"server.distill.sharpen": 0.5, "server.distill.divide_by_classes": True}


def _settings(
    teacher: tuple[float, int, float],
    student: float,
    server: tuple[int, int, float, float, int],
    **others: object,
) -> dict[str, object]:
    """The columns of the authors' presets: rate, step and γ; rate; epochs, batch, rates and samples of the server.

    `others` are keys with `__` for the dot.
    """
    return {
        **_LOCAL,
        **dict(zip(("teacher.rate", "teacher.rate_step", "teacher.rate_gamma"), teacher, strict=True)),
        **_SAMPLING,
        "student.rate": student,
        **_SERVER,
        **{
            f"server.distill.{key}": value
            for key, value in zip(
                ("epochs", "batch_size", "teacher_rate", "student_rate", "samples"), server, strict=True
            )
        },
        **{key.replace("__", "."): value for key, value in others.items()},
    }


_CIFAR10 = _settings(
    (0.055, 3, 0.85), 0.02, (20, 128, 0.0015, 0.0025, 10), client__augment="crop_flip", data__server_pool=10_000
)
_CIFAR100 = {**_CIFAR10, "teacher.pretrained": True, "student.pretrained": True}  # ImageNet's weights

REGIMES: dict[str, tuple[Regime, ...]] = {
    "mnist": (
        Regime(
            ("major_classes",), 2, 500, 100, None,
            _accuracies(
                fedavg=97.74, fedswag=97.75, fedbe=97.82, fedpa=96.86, fedppd=97.85, fedppd_distill=98.08
            ),
            {
                **_settings((0.045, 2, 0.85), 0.055, (20, 64, 0.001, 0.001, 10), data__server_pool=10_000),
                "data.partition.extra_per_class": 10,
            },
        ),
    ),
    "femnist": (
        Regime(
            ("major_classes", "writers"), None, 2000, 200, "kmnist",
            _joined(
                _accuracies(
                    fedavg=87.40, fedswag=87.45, fedbe=88.12, fedpa=86.47, fedppd=88.81, fedppd_distill=88.80
                ),
                {
                    "fedavg": {"ood_auroc": 0.957},
                    "fedppd": {"ood_auroc": 0.983},
                    "fedppd_distill": {"ood_auroc": 0.949},
                },
            ),
            # Their pool, four of LEAF's files, is a number of writers and not of rows: it is not compared.
            _settings((0.05, 3, 0.8), 0.085, (50, 128, 0.001, 0.001, 120), client__rate_decay=0.99),
            {"fedppd_distill": {"teacher.rate": 0.06, "teacher.rate_gamma": 0.85}},
        ),
    ),
    "cifar10": (
        Regime(
            ("major_classes",), 2, 2100, 200, "svhn",
            _joined(
                _accuracies(
                    fedavg=57.20, fedswag=57.34, fedbe=60.18, fedpa=50.88, fedppd=61.86, fedppd_distill=64.62
                ),
                _CIFAR10_CALIBRATION,
            ),
            {**_CIFAR10, "data.partition.extra_per_class": 10},
        ),
        Regime(
            ("iid",), None, 4000, 200, "svhn",
            _accuracies(fedavg=73.80, fedbe=73.99, fedppd=74.91, fedppd_distill=75.26),
            _CIFAR10,
        ),
    ),
    "cifar100": (
        Regime(
            ("major_classes",), 20, 2200, 200, "svhn",
            _joined(
                _accuracies(
                    fedavg=47.02, fedswag=47.07, fedbe=47.52, fedpa=42.18, fedppd=53.00, fedppd_distill=54.60
                ),
                {
                    "fedavg": {"ece": 28.83, "ood_auroc": 0.703},
                    "fedppd": {"ece": 13.92, "ood_auroc": 0.698},
                    "fedppd_distill": {"ece": 13.57, "ood_auroc": 0.784},
                },
            ),
            {**_CIFAR100, "data.partition.extra_per_class": 2},
        ),
        Regime(
            ("iid",), None, 4000, 200, "svhn",
            _accuracies(fedavg=53.38, fedbe=53.16, fedppd=63.67, fedppd_distill=63.43),
            _CIFAR100,
        ),
    ),
}  # fmt: skip


def regime_of(config: Config, rows: float | None) -> Regime | None:
    """The paper's experiment that this one repeats, if it does; `rows` is what a client really held, on average.

    It does where data set, partition (kind and major classes), number of clients and full participation are the
    paper's, rows a client within 20 % of its, and no client brings rows of its own. Rounds and settings are free: a
    table has to say how they differ.
    """
    part = config.data.partition
    if rows is None or config.federation.clients != _CLIENTS or config.federation.participation < 1:
        return None
    if any(section.data for section in config.clients.values()):
        return None
    for regime in REGIMES.get(config.data.name, ()):
        same_kind = part.kind in regime.kinds and (
            part.kind != "major_classes" or regime.major is None or part.major == regime.major
        )
        if same_kind and abs(rows - regime.rows) <= _ROWS_TOLERANCE * regime.rows:
            return regime
    return None


def paper_figures(regime: Regime | None, method: str, ood: str | None) -> Figures:
    """metric → the paper's value for this method; empty where it has none.

    OOD figures only where ours are against the same out-of-distribution set.
    """
    found = regime.figures.get(method, {}) if regime else {}
    return {
        metric: value
        for metric, value in found.items()
        if metric != "ood_auroc" or (regime is not None and ood == regime.ood)
    }


def other_settings(regime: Regime | None, method: str, config: Config) -> list[str]:
    """Where this method does not run as the authors ran it: lines `key: theirs -> ours`, without the rounds."""
    if regime is None or method not in regime.figures:
        return []
    theirs = {
        key: value
        for key, value in {**regime.settings, **regime.own_settings.get(method, {})}.items()
        if (config.method == "fedppd" or not (key in _SAMPLING or key == "student.rate"))
        and (config.distils_on_server or not key.startswith(("server.distill.", "data.server_pool")))
    }
    ours = flatten(config)
    return difference(theirs, {key: ours[key] for key in theirs})
