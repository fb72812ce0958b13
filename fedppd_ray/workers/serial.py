"""The executor without Ray: everything in this process, one client after the other. For debugging, as the reference."""

import logging
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config.schema import Config
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.executor import Arrival, Lost
from fedppd_ray.federation.types import ClientInfo, ClientUpdate, GlobalState, Receipt
from fedppd_ray.inference.questions import Answer, Question
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.server import ServerWorker

log = logging.getLogger(__name__)


class SerialExecutor:
    def __init__(self, config: Config, clients: Sequence[str], acquisition_states: Sequence[GlobalState] = ()) -> None:
        if config.federation.deadline_s is not None:
            raise ConfigError(
                "federation.deadline_s: without Ray clients work one after the other and nobody is late; remove it, or "
                "leave --serial out"
            )
        # The same arithmetic as an actor's: the number of threads may change the last bit.
        torch.set_num_threads(1)
        worker = ServerWorker(config)
        self.server = SerialServer(worker)
        self.clients = SerialClients(ClientWorker(config, clients, acquisition_states=acquisition_states))
        self.evaluation = SerialEvaluator(worker)

    def close(self) -> None:
        return None


class SerialServer:
    def __init__(self, worker: ServerWorker) -> None:
        self._worker = worker

    def install(self, state: GlobalState | None) -> None:
        self._worker.install(state)

    def state(self) -> GlobalState:
        return self._worker.state()

    def begin(self, round_id: int) -> GlobalState:
        return self._worker.begin(round_id)

    def refusal(self, arrival: Arrival) -> str | None:
        return self._worker.refusal(arrival.client, _update(arrival))

    def fold(self, arrival: Arrival) -> Receipt:
        return self._worker.fold(_update(arrival))

    def finish(self) -> None:
        self._worker.finish()


class SerialClients:
    def __init__(self, worker: ClientWorker) -> None:
        self._worker = worker
        self._queue: deque[str] = deque()
        self._published: GlobalState | None = None

    def describe(self) -> list[ClientInfo]:
        return self._worker.describe()

    def ask(self, question: Question, state: GlobalState) -> dict[str, Answer]:
        return self._worker.answers(question, state)

    def open(self, round_id: int, published: object) -> None:
        if not isinstance(published, GlobalState) or published.round + 1 != round_id:
            raise RuntimeError(f"round {round_id} was not begun: the server published another state")
        self._queue.clear()
        self._published = published

    def start(self, client: str) -> None:
        self._queue.append(client)

    def next_event(self) -> Arrival | Lost:
        client = self._queue.popleft()
        if self._published is None:
            raise RuntimeError("open() comes before next_event()")
        try:
            update = self._worker.local_update(client, self._published)
        except Exception as error:  # whatever it is: on Ray too it costs this client its attempt, not the run
            log.debug("%s", client, exc_info=error)
            return Lost(client, f"{type(error).__name__}: {error}")
        return Arrival(client, update.receipt, update.models)


class SerialEvaluator:
    def __init__(self, worker: ServerWorker) -> None:
        self._worker = worker

    def predict(self, split: str) -> NDArray[np.float64]:
        return self._worker.predict(split)


def _update(arrival: Arrival) -> ClientUpdate:
    return ClientUpdate(arrival.receipt, arrival.payload)  # type: ignore[arg-type]
