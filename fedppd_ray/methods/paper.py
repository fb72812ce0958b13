"""What the paper (ACML 2023, PMLR 222) reports of each method, and the settings that its authors ran.

Experiments are named as in `studies/paper.py`, which says when a run repeats one. Settings are grouped by who reads
them; a method's rows in a comparison name the groups that apply to it. The rates of the authors' baselines are not
published: ours are half of the teacher's, the drift of the same chain without its noise, and are not compared.
"""

from collections.abc import Mapping

Figures = Mapping[str, float]  # metric → value, in the units of `evaluation.metrics.Scores`

# Groups of keys, by their prefix or name.
LOCAL = (
    *("client.epochs", "client.batch_size", "client.rate_schedule", "client.rate_decay", "client.augment"),
    *("client.label_shift", "client.class_weights", "client.outliers.weight", "client.transforms"),
    *("federation.aggregation", "federation.server_momentum", "teacher.network", "teacher.pretrained"),
)
SAMPLING = (
    *("teacher.rate", "teacher.rate_step", "teacher.rate_gamma", "teacher.sampler", "teacher.temperature"),
    *("teacher.prior_precision", "teacher.send"),
    *("student.network", "student.pretrained", "student.rate", "student.weight_decay", "student.input_noise"),
    *("student.distill_every", "student.label_weight", "student.label_weight_end", "student.mixup"),
)
SERVER = ("server.distill", "data.server_pool")

# What the authors had in every experiment, unless `_EXPERIMENTS` says otherwise.
_EVERYWHERE: dict[str, object] = {
    "client.epochs": 10,
    "client.batch_size": 40,
    "client.rate_schedule": "decay",
    "client.rate_decay": 1.0,
    "client.label_shift": 0.0,
    "client.class_weights": "none",
    "client.outliers.weight": 0.0,
    "client.augment": "none",
    "client.transforms": [],
    "federation.aggregation": "mean",
    "federation.server_momentum": 0.0,
    "teacher.network": "auto",
    "teacher.pretrained": False,
    "teacher.sampler": "sgld",
    "teacher.temperature": "4/N",
    "teacher.prior_precision": "1e-4*N",
    "teacher.send": "last",
    "student.network": "auto",
    "student.pretrained": False,
    "student.weight_decay": 1e-4,
    "student.input_noise": 0.001,
    "student.distill_every": "epoch",
    "student.label_weight": 0.0,
    "student.label_weight_end": None,
    "student.mixup": 0.0,
    "server.distill.spread": 0.1,
    "server.distill.scale": 1.0,
    "server.distill.min_variance": 1e-5,
    "server.distill.pooling": "mixture",
    "server.distill.power": 1.0,
    "server.distill.sharpen": 0.5,
    "server.distill.every": 1,
    "server.distill.from_round": 1,
    "server.distill.divide_by_classes": True,
    "server.distill.momentum": 0.9,
    "server.distill.weight_decay": 1e-4,
    "server.distill.swa_start": 500,
    "server.distill.swa_every": 25,
    "data.server_pool": 10_000,
}


def _columns(
    teacher: tuple[float, int, float], student: float, server: tuple[int, int, float, float, int]
) -> dict[str, object]:
    """The columns of the authors' presets: rate, step and γ; rate; epochs, batch, rates and samples of the server."""
    keys = ("epochs", "batch_size", "teacher_rate", "student_rate", "samples")
    return {
        **dict(zip(("teacher.rate", "teacher.rate_step", "teacher.rate_gamma"), teacher, strict=True)),
        "student.rate": student,
        **{f"server.distill.{key}": value for key, value in zip(keys, server, strict=True)},
    }


_CIFAR10 = {
    **_columns((0.055, 3, 0.85), 0.02, (20, 128, 0.0015, 0.0025, 10)),
    "client.augment": "crop_flip",
}
_CIFAR100 = {**_CIFAR10, "teacher.pretrained": True, "student.pretrained": True}  # ImageNet's weights
_EXPERIMENTS: dict[str, dict[str, object]] = {
    "mnist": _columns((0.045, 2, 0.85), 0.055, (20, 64, 0.001, 0.001, 10)),
    "femnist": {
        **_columns((0.05, 3, 0.8), 0.085, (50, 128, 0.001, 0.001, 120)),
        "client.rate_decay": 0.99,
    },
    "cifar10": _CIFAR10,
    "cifar10_iid": _CIFAR10,
    "cifar100": _CIFAR100,
    "cifar100_iid": _CIFAR100,
}
# FEMNIST's pool, four of LEAF's files, is a number of writers and not of rows: it is not compared.
_NOT_COMPARED = {"femnist": {"data.server_pool"}}

_SUMMARY = ("ece", "mce", "brier", "ood_auroc", "misclassification_auroc")
_FIGURES: dict[str, dict[str, Figures]] = {
    "mnist": {
        label: {"accuracy": value}
        for label, value in {
            "fedavg": 97.74,
            "fedswag": 97.75,
            "fedbe": 97.82,
            "fedpa": 96.86,
            "fedppd": 97.85,
            "fedppd_distill": 98.08,
        }.items()
    },
    "femnist": {
        "fedavg": {"accuracy": 87.40, "ood_auroc": 0.957},
        "fedswag": {"accuracy": 87.45},
        "fedbe": {"accuracy": 88.12},
        "fedpa": {"accuracy": 86.47},
        "fedppd": {"accuracy": 88.81, "ood_auroc": 0.983},
        "fedppd_distill": {"accuracy": 88.80, "ood_auroc": 0.949},
    },
    "cifar10": {
        label: dict(zip(("accuracy", *_SUMMARY), values, strict=False))
        for label, values in {
            "fedavg": (57.20, 16.88, 24.71, 0.60, 0.728, 0.742),
            "fedswag": (57.34, 16.69, 23.16, 0.60, 0.728, 0.743),
            "fedbe": (60.18, 19.26, 27.54, 0.59, 0.728, 0.753),
            "fedpa": (50.88,),
            "fedppd": (61.86, 4.31, 6.62, 0.50, 0.701, 0.755),
            "fedppd_distill": (64.62, 10.83, 16.71, 0.49, 0.765, 0.769),
        }.items()
    },
    "cifar10_iid": {
        label: {"accuracy": value}
        for label, value in {"fedavg": 73.80, "fedbe": 73.99, "fedppd": 74.91, "fedppd_distill": 75.26}.items()
    },
    "cifar100": {
        "fedavg": {"accuracy": 47.02, "ece": 28.83, "ood_auroc": 0.703},
        "fedswag": {"accuracy": 47.07},
        "fedbe": {"accuracy": 47.52},
        "fedpa": {"accuracy": 42.18},
        "fedppd": {"accuracy": 53.00, "ece": 13.92, "ood_auroc": 0.698},
        "fedppd_distill": {"accuracy": 54.60, "ece": 13.57, "ood_auroc": 0.784},
    },
    "cifar100_iid": {
        label: {"accuracy": value}
        for label, value in {"fedavg": 53.38, "fedbe": 53.16, "fedppd": 63.67, "fedppd_distill": 63.43}.items()
    },
}


def figures(label: str) -> dict[str, Figures]:
    """Experiment → what the paper reports of this row."""
    return {name: by_label[label] for name, by_label in _FIGURES.items() if label in by_label}


def authors(*groups: tuple[str, ...], **own: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Experiment → what its authors set, of the keys in these groups; `own`: what this row alone has, by experiment."""
    wanted = tuple(key for group in groups for key in group)
    return {
        name: {
            key: value
            for key, value in {**_EVERYWHERE, **changes, **own.get(name, {})}.items()
            if key.startswith(wanted) and key not in _NOT_COMPARED.get(name, ())
        }
        for name, changes in _EXPERIMENTS.items()
    }
