"""[4] One algorithm per file, behind the contract in `base`: arithmetic, settings, needs, its rows in compare."""

import torch

from fedppd_ray.config.nouns import METHODS
from fedppd_ray.config.schema import Config
from fedppd_ray.methods.base import Method, Row
from fedppd_ray.methods.fedavg import FedAvg
from fedppd_ray.methods.fedbe import FedBE
from fedppd_ray.methods.fedpa import FedPA
from fedppd_ray.methods.fedppd import FedPPD
from fedppd_ray.methods.fedswag import FedSWAG

# In the order of a comparison.
for _method in (FedAvg, FedBE, FedSWAG, FedPA, FedPPD):
    METHODS.register(_method.name, _method, __name__)

# What a study of active learning holds against each other unless it is told otherwise.
ACTIVE_ROWS = (FedAvg.name, FedPPD.name)


def method_class(config: Config) -> type[Method]:
    found: type[Method] = METHODS[config.method]
    return found


def build_method(config: Config, device: torch.device | str = "cpu") -> Method:
    return method_class(config)(config, device)


def compare_rows() -> dict[str, Row]:
    """Label → row, of every registered method."""
    return {row.label: row for name in METHODS for row in METHODS[name].rows()}
