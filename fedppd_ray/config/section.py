"""[1] What every section of the configuration has in common."""

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Python and pydantic take true for 1; who writes `seed: yes` means something else."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation not in (bool, bool | None):
            raise ValueError(f"{str(value).lower()} is not a valid value")
        return value
