"""[5] The server: owns the global state, screens and folds updates, makes the next state.

A plain class; the runtime makes it a Ray actor.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config import Config
from fedppd_ray.core.aggregate import refusal
from fedppd_ray.core.types import ClientUpdate, GlobalState, Receipt
from fedppd_ray.data.batches import Shard
from fedppd_ray.errors import FedPPDError, ServerLostError
from fedppd_ray.evaluation.predictive import HeldOut
from fedppd_ray.methods import build_method
from fedppd_ray.methods.base import Aggregation


class ServerWorker:
    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        self._config = config
        self._method = build_method(config, device)
        self._held_out = HeldOut(config, device)
        self._state: GlobalState | None = None
        self._aggregation: Aggregation | None = None

    def install(self, state: GlobalState | None) -> None:
        """Take over a saved state, or start from the method's initial one. Ends any round in progress."""
        self._state = state or GlobalState(0, self._method.initial_models())
        self._aggregation = None

    def state(self) -> GlobalState:
        if self._state is None:
            raise ServerLostError("the server has no state: its process was started anew")
        return self._state

    def begin(self, round_id: int) -> GlobalState:
        state = self.state()
        if round_id != state.round + 1:
            raise ServerLostError(f"the server is at round {state.round}, asked for round {round_id}")
        self._aggregation = self._method.aggregation(state)
        return state

    def refusal(self, client: str, update: ClientUpdate) -> str | None:
        state = self.state()
        return refusal(client, update, state.round + 1, self._method.update_sizes(state))

    def fold(self, update: ClientUpdate) -> Receipt:
        # Screened again where it counts: nothing reaches the aggregate on another's word.
        reason = self.refusal(update.receipt.client, update)
        if reason is not None:
            raise ValueError(f"{update.receipt.client}: update refused: {reason}")
        self._current().fold(update)
        return update.receipt

    def finish(self) -> None:
        models = self._current().finish(self._pool())
        for role, vector in models.items():
            if not np.isfinite(vector).all():  # an average of screened updates is finite, training on the server not
                key = "fedpa.server_rate" if self._config.method == "fedpa" else "the rates of server.distill"
                raise FedPPDError(
                    f"round {self.state().round + 1}: the server's update of the {role} diverged; lower {key} "
                    f"and start again"
                )
        self._state = GlobalState(self.state().round + 1, models)
        self._aggregation = None

    def predict(self, split: str) -> NDArray[np.float64]:
        return self._held_out.log_probabilities(self._method.predictor(self.state().models), split)

    def _current(self) -> Aggregation:
        if self._aggregation is None:
            raise ServerLostError("the server is in no round: its process was started anew")
        return self._aggregation

    def _pool(self) -> Shard | None:
        return self._held_out.server_pool() if self._config.distils_on_server else None
