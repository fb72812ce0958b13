"""Who is asked to predict: the method, or its teacher."""

from fedppd_ray.federation.types import Models
from fedppd_ray.inference.predictor import Predictor, network_predictor
from fedppd_ray.methods.base import Method

TEACHER = "teacher:"  # before the name of a split: what the network says that the student learns from


def asked(method: Method, models: Models, split: str) -> tuple[Predictor, str]:
    """The predictor that is meant, and the split's name."""
    if not split.startswith(TEACHER):
        return method.predictor(models), split
    teacher = method.teacher(models)
    if teacher is None:
        raise ValueError(f"method {method.name} has no teacher")
    return network_predictor(teacher), split.removeprefix(TEACHER)
