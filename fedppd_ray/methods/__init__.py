"""One algorithm a file, behind the contract in `base`."""

import torch

from fedppd_ray.config import Config
from fedppd_ray.methods.base import Method
from fedppd_ray.methods.fedavg import FedAvg
from fedppd_ray.methods.fedbe import FedBE
from fedppd_ray.methods.fedpa import FedPA
from fedppd_ray.methods.fedppd import FedPPD
from fedppd_ray.methods.fedswag import FedSWAG

METHODS: dict[str, type[Method]] = {
    "fedppd": FedPPD,
    "fedavg": FedAvg,
    "fedbe": FedBE,
    "fedswag": FedSWAG,
    "fedpa": FedPA,
}


def build_method(config: Config, device: torch.device | str = "cpu") -> Method:
    return METHODS[config.method](config, device)
