"""[1] The facts of a user's table (`data.name: table`): columns, their kinds, and how a row becomes numbers.

They are part of the configuration and of the model card, so that neither serving nor a client's node needs a file.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from fedppd_ray.config.section import Section

TABLE = "table"
SHIFTED = "shifted"  # the out-of-distribution set of tables


class ColumnConfig(Section):
    """A column and what is known of its values, over all clients."""

    name: str = Field(min_length=1, description="as the header of the file has it")
    kind: Literal["numeric", "categorical"] = Field(description="numbers, or texts of which there are few")
    mean: float = Field(default=0.0, description="numeric: subtracted")
    std: float = Field(default=1.0, gt=0, description="numeric: divided by")
    low: float | None = Field(default=None, description="numeric: the least value seen in training")
    high: float | None = Field(default=None, description="numeric: the largest")
    categories: tuple[str, ...] = Field(default=(), description="categorical: one number each, 0 or 1")
    missing: bool = Field(default=False, description="whether a number says that the value is missing")

    @property
    def width(self) -> int:
        """Numbers that a value becomes."""
        return (1 if self.kind == "numeric" else len(self.categories)) + self.missing


class TableConfig(Section):
    """`target` (and `client_column`, `kinds`, `ignore`) say what is meant; the rest is read off the files once."""

    target: str = Field(min_length=1, description="the column to predict")
    client_column: str | None = Field(default=None, description="the column that says whose row it is")
    embedded: Literal["breast_cancer"] | None = Field(default=None, description="a table that needs no file")
    kinds: dict[str, Literal["numeric", "categorical"]] = Field(default={}, description="where guessing is wrong")
    ignore: tuple[str, ...] = Field(default=(), description="columns that are not used")
    classes: tuple[str, ...] = Field(min_length=2, description="values of the target, sorted")
    clients: tuple[str, ...] = Field(default=(), description="values of client_column: client-00 has the first")
    columns: tuple[ColumnConfig, ...] = Field(min_length=1)

    @property
    def features(self) -> int:
        """Numbers that a row becomes."""
        return sum(column.width for column in self.columns)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names) or len(set(self.classes)) < len(self.classes):
            raise ValueError("a column or a class comes twice")
        if self.target in names:
            raise ValueError(f"{self.target} is the target and cannot be a column as well; remove it from columns")
        return self
