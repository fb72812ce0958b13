"""How clients' models become one: rules by name, of which the weighted mean is the first.

A rule is a component of the server's update: any method that averages asks `build_rule` for one.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.nouns import AGGREGATIONS
from fedppd_ray.federation.types import Models
from fedppd_ray.models.flat import Vector

_PIECE = 65_536  # numbers; half a megabyte of float64


class StreamingAverage:
    """Σ n_k v_k / Σ n_k, added one by one in O(model) memory.

    Sums are float64; callers add in a fixed order, so that arrival order cannot change a bit.
    """

    def __init__(self, size: int) -> None:
        self._sum: NDArray[np.float64] = np.zeros(size)
        self._weight = 0

    def add(self, vector: Vector, weight: int) -> None:
        # float32 × int stays exact in float64.
        for part in self._parts():
            self._sum[part] += np.multiply(vector[part], weight, dtype=np.float64)
        self._weight += weight

    def result(self) -> Vector:
        if self._weight == 0:
            raise ValueError("an average of nothing")
        average = np.empty(self._sum.size, np.float32)
        for part in self._parts():
            average[part] = self._sum[part] / self._weight
        return average

    def _parts(self) -> Iterator[slice]:
        """The vector piece by piece: a temporary that stays in the cache costs half as much as one that does not."""
        return (slice(start, start + _PIECE) for start in range(0, self._sum.size, _PIECE))


class Rule(Protocol):
    """One round's aggregate of some roles. `add` is called in a fixed order, `result` once."""

    def add(self, models: Models, weight: int) -> None:
        """A client's models (it may hold more roles than are aggregated); `weight` is its number of rows."""

    def result(self) -> dict[str, Vector]: ...


class Mean:
    """Σ n_k v_k / Σ n_k of each role, in O(model) memory."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._averages = {role: StreamingAverage(size) for role, size in sizes.items()}

    def add(self, models: Models, weight: int) -> None:
        for role, average in self._averages.items():
            average.add(models[role], weight)

    def result(self) -> dict[str, Vector]:
        return {role: average.result() for role, average in self._averages.items()}


AGGREGATIONS.register("mean", Mean, __name__)


def build_rule(name: str, sizes: Mapping[str, int]) -> Rule:
    """The rule `federation.aggregation`, for roles with vectors of these lengths."""
    rule: Rule = AGGREGATIONS[name](sizes)
    return rule
