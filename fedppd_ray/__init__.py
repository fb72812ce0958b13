"""Federated learning that knows what it does not know: FedPPD on Ray. The Python interface.

    import fedppd_ray as fp

    config = fp.load_config("quickstart", {"federation.rounds": 2})
    run = fp.train(config, out="runs/x")
    run.metrics()                        # a list of dictionaries, one per round
    run.evaluate()
    run.student().predict(images)
    fp.compare("quickstart", out="runs/compared", methods=["fedavg", "fedppd"])

docs/python.md tells the rest. Names are imported when they are first used: `import fedppd_ray` itself is quick.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedppd_ray.api import compare as compare
    from fedppd_ray.api import register_aggregation as register_aggregation
    from fedppd_ray.api import register_method as register_method
    from fedppd_ray.api import register_network as register_network
    from fedppd_ray.api import register_score as register_score
    from fedppd_ray.api import register_transform as register_transform
    from fedppd_ray.api import resume as resume
    from fedppd_ray.api import train as train
    from fedppd_ray.config.file import load_config as load_config
    from fedppd_ray.config.schema import Config as Config
    from fedppd_ray.errors import FedPPDError as FedPPDError
    from fedppd_ray.federation.observer import Observer as Observer
    from fedppd_ray.inference.scores import Score as Score
    from fedppd_ray.inference.student import Student as Student
    from fedppd_ray.methods.base import Method as Method
    from fedppd_ray.methods.base import Row as Row
    from fedppd_ray.methods.fedavg import FedAvg as FedAvg
    from fedppd_ray.runs.run import Run as Run

_HOMES = {
    "compare": "api",
    "register_aggregation": "api",
    "register_method": "api",
    "register_network": "api",
    "register_score": "api",
    "register_transform": "api",
    "resume": "api",
    "train": "api",
    "load_config": "config.file",
    "Config": "config.schema",
    "FedPPDError": "errors",
    "Observer": "federation.observer",
    "Score": "inference.scores",
    "Student": "inference.student",
    "Method": "methods.base",
    "Row": "methods.base",
    "FedAvg": "methods.fedavg",
    "Run": "runs.run",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - names of the table above

try:
    __version__ = version("fedppd-ray")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedppd_ray' has no attribute {name!r}")
    return getattr(import_module(f"fedppd_ray.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
