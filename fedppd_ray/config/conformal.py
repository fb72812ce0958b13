"""[1] The section `evaluation.conformal`: prediction sets with a stated confidence."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from fedppd_ray.config.section import Section
from fedppd_ray.registry import suggest


class ConformalConfig(Section):
    method: Literal["lac", "aps", "raps"] = Field(
        default="lac",
        description="lac: the smallest sets; aps: sets that grow with doubt; raps: aps, with fewer long sets",
    )
    confidence: float = Field(
        default=0.9, gt=0, lt=1, description="at which coverage and size of the sets are reported"
    )
    penalty: float = Field(default=0.1, ge=0, description="raps: added for each class beyond free_classes")
    free_classes: int = Field(default=1, ge=0, description="raps: classes of a set that cost no penalty")
    shares: Mapping[str, float] | None = Field(
        default=None, description="class → its share where the student is used, if not that of the calibration rows"
    )


def check_shares(config: ConformalConfig, classes: Sequence[str]) -> None:
    if config.shares is None:
        return
    for name in config.shares:
        if name not in classes:
            raise ValueError(f"evaluation.conformal.shares: no class {name!r}{suggest(name, list(classes))}")
    for name in classes:
        if not config.shares.get(name, 0) > 0:
            raise ValueError(f"evaluation.conformal.shares: class {name!r} needs a share above 0")
