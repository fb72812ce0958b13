"""[1] The section `evaluation.ood_flag`: when an answer says that its row looks like none of the known ones."""

from pydantic import Field

from fedppd_ray.config.section import Section


class OodFlagConfig(Section):
    score: str | None = Field(default=None, description="by which score; null: that of evaluation.score")
    false_alarms: float = Field(default=0.05, gt=0, lt=1, description="share of known rows that may be flagged")
