"""[5] The server: owns the global state, screens and folds updates, makes the next state.

A plain class; the runtime makes it a Ray actor.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config.schema import Config
from fedppd_ray.data.rows import Shard
from fedppd_ray.errors import FedPPDError, ServerLostError
from fedppd_ray.federation.screen import refusal
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Receipt
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.methods import build_method
from fedppd_ray.methods.base import Aggregation
from fedppd_ray.workers.asked import asked


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

    def broadcast(self) -> GlobalState:
        """What the clients are sent of it."""
        return self.state().broadcast()

    def begin(self, round_id: int) -> GlobalState:
        """Start a round; returns what the clients are sent."""
        state = self.state()
        if round_id != state.round + 1:
            raise ServerLostError(f"the server is at round {state.round}, asked for round {round_id}")
        self._aggregation = self._method.aggregation(state)
        return state.broadcast()

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
        result = self._current().finish(self._pool())
        for role, vector in {**result.models, **result.kept}.items():
            if not np.isfinite(vector).all():  # an average of screened updates is finite, training on the server not
                raise FedPPDError(
                    f"round {self.state().round + 1}: the server's update of the {role} diverged; lower "
                    f"{self._method.server_rates(self._config)} and start again"
                )
        self._state = GlobalState(self.state().round + 1, result.models, result.kept)
        self._aggregation = None

    def predict(self, split: str) -> NDArray[np.float64]:
        return self._held_out.log_probabilities(*asked(self._method, self.state().models, split))

    def _current(self) -> Aggregation:
        if self._aggregation is None:
            raise ServerLostError("the server is in no round: its process was started anew")
        return self._aggregation

    def _pool(self) -> Shard | None:
        return self._held_out.server_pool() if self._config.data.server_pool else None
