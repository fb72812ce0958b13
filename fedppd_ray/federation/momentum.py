"""Server momentum (FedAvgM, Hsu et al., 2019): the server goes on in the direction that the averages have taken.

    v ← μ v + (mean − θ_g),   θ_g ← θ_g + v

for the parameters of every role; buffers take the mean, because a running variance must not become negative. The
velocity is the server's own: it is saved and resumed with the models and sent to no client.
"""

from collections.abc import Mapping

import numpy as np

from fedppd_ray.federation.types import GlobalState, Models
from fedppd_ray.models.flat import Vector

_VELOCITY = "velocity/"  # before the role


def with_momentum(
    state: GlobalState, averages: Models, parameters: Mapping[str, int], momentum: float
) -> tuple[dict[str, Vector], dict[str, Vector]]:
    """The next models and what the server keeps; `parameters` says how many numbers of a role's vector are weights.

    Roles of `averages` that it does not name, and all of them without momentum, pass as they are.
    """
    models, kept = dict(averages), dict[str, Vector]()
    if momentum == 0:
        return models, kept
    for role, count in parameters.items():
        start = state.models[role][:count].astype(np.float64)
        velocity = averages[role][:count] - start
        before = state.kept.get(_VELOCITY + role)
        if before is not None:
            velocity += momentum * before.astype(np.float64)
        model = np.array(averages[role], np.float32)
        model[:count] = start + velocity
        models[role], kept[_VELOCITY + role] = model, velocity.astype(np.float32)
    return models, kept
