"""A method from outside: FedAvg whose server goes only a part of the way to the clients' mean."""

from typing import Any, ClassVar

from pydantic import Field

import fedppd_ray as fp
from fedppd_ray.config.schema import settings_of
from fedppd_ray.config.section import Section
from fedppd_ray.methods.base import ServerResult
from fedppd_ray.methods.fedavg import FedAvg, FedAvgSettings


class StepConfig(Section):
    share: float = Field(default=0.5, gt=0, le=1, description="of the way to the mean")


class HalfStepSettings(FedAvgSettings):
    half_step: StepConfig = StepConfig()


@fp.register_method
class HalfStep(FedAvg):
    """FedAvg with a server step."""

    name = "half_step"
    Settings: ClassVar[type[Section]] = HalfStepSettings

    @classmethod
    def rows(cls) -> tuple[Any, ...]:
        return (fp.Row("half_step", ("method=half_step",)),)

    def aggregation(self, state: Any) -> Any:
        return _Part(super().aggregation(state), state, settings_of(self.config, HalfStepSettings).half_step.share)


class _Part:
    def __init__(self, mean: Any, state: Any, share: float) -> None:
        self._mean, self._state, self._share = mean, state, share

    def fold(self, update: Any) -> None:
        self._mean.fold(update)

    def finish(self, pool: Any) -> ServerResult:
        mean, start = self._mean.finish(pool), self._state.models
        part = {role: start[role] + self._share * (mean.models[role] - start[role]) for role in mean.models}
        return ServerResult(part, mean.kept)
