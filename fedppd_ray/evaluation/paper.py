"""The figures that the paper reports (ACML 2023, PMLR 222), and when a run may stand beside them."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedppd_ray.config import Config

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

REGIMES: dict[str, tuple[Regime, ...]] = {
    "mnist": (
        Regime(
            ("major_classes",), 2, 500, 100, None,
            _accuracies(
                fedavg=97.74, fedswag=97.75, fedbe=97.82, fedpa=96.86, fedppd=97.85, fedppd_distill=98.08
            ),
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
        ),
        Regime(
            ("iid",), None, 4000, 200, "svhn",
            _accuracies(fedavg=73.80, fedbe=73.99, fedppd=74.91, fedppd_distill=75.26),
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
        ),
        Regime(
            ("iid",), None, 4000, 200, "svhn",
            _accuracies(fedavg=53.38, fedbe=53.16, fedppd=63.67, fedppd_distill=63.43),
        ),
    ),
}  # fmt: skip


def regime_of(config: Config, rows: float | None) -> Regime | None:
    """The paper's experiment that this one repeats, if it does; `rows` is what a client really held, on average.

    It does where data set, partition (kind and major classes), number of clients and full participation are the
    paper's, and rows a client within 20 % of its. The number of rounds is free: a table has to say it.
    """
    part = config.data.partition
    if rows is None or config.federation.clients != _CLIENTS or config.federation.participation < 1:
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
