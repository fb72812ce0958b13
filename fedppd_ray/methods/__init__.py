"""One algorithm a file, behind the contract in `base`."""

import torch

from fedppd_ray.config import Config
from fedppd_ray.methods.base import Method
from fedppd_ray.methods.fedppd import FedPPD

METHODS: dict[str, type[Method]] = {"fedppd": FedPPD}


def build_method(config: Config, device: torch.device | str = "cpu") -> Method:
    return METHODS[config.method](config, device)
