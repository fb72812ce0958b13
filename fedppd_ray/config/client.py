"""[1] The `client` section: local work, and what changes in it from round to round."""

from typing import Literal

from pydantic import Field

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.config.section import Section

_SMALLEST_SIDE = 8  # of an image that outliers are made of: its blocks and crops then have two at least


class OutlierConfig(Section):
    """Synthetic outliers, for which the network that is served learns to be unsure."""

    weight: float = Field(default=0.0, ge=0, description="λ_o, of their term in the loss; 0: none")
    share: float = Field(default=0.25, gt=0, le=1, description="outliers per row of a batch")
    start: float = Field(default=0.75, ge=0, lt=1, description="share of the rounds before the first with outliers")


class ClientConfig(Section):
    epochs: int = Field(default=5, ge=1, description="local epochs of a round")
    batch_size: int = Field(default=40, ge=1, description="rows of a local minibatch")
    augment: Literal["none", "crop_flip"] = Field(
        default="none", description="crop_flip: random crops and mirror images while training"
    )
    rate_schedule: Literal["decay", "cosine"] = Field(
        default="decay", description="of all clients' rates, over the rounds"
    )
    rate_decay: float = Field(default=1.0, gt=0, le=1, description="decay: factor from round to round")
    rate_end: float = Field(default=0.02, gt=0, le=1, description="cosine: share of the first rate in the last round")
    label_shift: float = Field(
        default=0.0, ge=0, description="τ: how far a client's own class shares explain its labels; 0: not at all"
    )
    class_weights: Literal["none", "balanced"] = Field(
        default="none",
        description="balanced: every class that a client holds counts alike in its likelihood, however few its rows",
    )
    outliers: OutlierConfig = OutlierConfig()
    transforms: tuple[str, ...] = Field(default=(), description="what an update passes, in order, before it leaves")

    def by_rounds(self) -> list[str]:
        """The keys that make a round depend on how many are planned."""
        found = ["client.rate_schedule"] if self.rate_schedule == "cosine" else []
        if self.outliers.weight and self.outliers.start:
            found.append("client.outliers.start")
        return found


def check_client(client: ClientConfig, info: DatasetInfo) -> None:
    """ValueError for settings that do not fit together, or that nobody would read."""
    if client.rate_schedule == "cosine" and client.rate_decay != 1:
        raise ValueError("client.rate_decay: client.rate_schedule=cosine lowers the rates already; remove one of them")
    if client.rate_schedule == "decay" and client.rate_end != ClientConfig.model_fields["rate_end"].default:
        raise ValueError("client.rate_end: only client.rate_schedule=cosine has an end; set it, or remove rate_end")
    if client.class_weights != "none" and client.label_shift:
        raise ValueError(
            "client.class_weights: client.label_shift makes up for a client's class shares already; remove one of them"
        )
    outliers = client.outliers
    if outliers.weight == 0:
        for key in ("share", "start"):
            if getattr(outliers, key) != OutlierConfig.model_fields[key].default:
                raise ValueError(
                    f"client.outliers.{key}: client.outliers.weight=0 makes none; set weight above 0, or remove {key}"
                )
    elif len(info.shape) != 3 or min(info.shape[1:]) < _SMALLEST_SIDE:
        raise ValueError(
            f"client.outliers: they are made of images of at least {_SMALLEST_SIDE}×{_SMALLEST_SIDE}, and "
            f"{info.name} has inputs {info.shape}; remove client.outliers"
        )
