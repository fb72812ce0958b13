"""[3] A client: its private rows and its networks, resident as long as the run.

A plain class; the runtime makes it a Ray actor. It answers with weights, counts and metrics, never with rows.
One worker may act for several virtual clients.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config.schema import Config
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.data.parts import Split
from fedppd_ray.data.rows import Shard, make_shard
from fedppd_ray.data.site_check import check_rows
from fedppd_ray.errors import DataError, FedPPDError
from fedppd_ray.federation.transforms import transformed
from fedppd_ray.federation.types import ClientInfo, ClientUpdate, GlobalState, Receipt
from fedppd_ray.inference.held_out import HeldOut, outputs_on
from fedppd_ray.inference.predictor import BATCH, network_predictor
from fedppd_ray.inference.questions import FEWEST_ROWS, Answer, Question, answer_to
from fedppd_ray.inference.scores import Outputs, entropy
from fedppd_ray.methods import build_method
from fedppd_ray.workers.asked import asked
from fedppd_ray.workers.labelling import Indices, Uncertainty, labelled_rows

log = logging.getLogger(__name__)


class _Seen:
    """What the last state said of clients' rows: many questions are asked about one."""

    def __init__(self) -> None:
        self._state: GlobalState | None = None
        self._outputs: dict[str, Outputs] = {}

    def of(self, client: str, state: GlobalState) -> Outputs | None:
        return self._outputs.get(client) if self._is_last(state) else None

    def keep(self, client: str, state: GlobalState, outputs: Outputs) -> None:
        if not self._is_last(state):
            self._state, self._outputs = state, {}
        self._outputs[client] = outputs

    def _is_last(self, state: GlobalState) -> bool:
        if state is self._state:
            return True
        last = self._state
        return (
            last is not None
            and (state.round, state.models.keys()) == (last.round, last.models.keys())
            and all(np.array_equal(vector, last.models[role]) for role, vector in state.models.items())
        )


@contextmanager
def _named(client: str) -> Iterator[None]:
    """Whatever goes wrong with a client's rows names the client; expected errors do so themselves."""
    try:
        yield
    except FedPPDError:
        raise
    except Exception as error:
        raise DataError(f"{client}: {type(error).__name__}: {error}") from error


class ClientWorker:
    def __init__(
        self,
        config: Config,
        clients: Sequence[str],
        device: torch.device | str = "cpu",
        acquisition_states: Sequence[GlobalState] = (),
    ) -> None:
        """`acquisition_states`, active learning: the global models by which clients chose rows to label, in order."""
        self._config = config
        self._acquisition_states = tuple(acquisition_states)
        self._clients = tuple(clients)
        self._device = torch.device(device)
        self._holdings = Holdings(config, clients)
        self._labelled: dict[str, Indices] = {}
        self._shards: dict[str, Shard] = {}
        self._method = build_method(config, self._device)
        self._held_out: HeldOut | None = None
        self._seen = _Seen()
        self._cancelled_round = 0

    def describe(self, clients: Sequence[str] | None = None) -> list[ClientInfo]:
        """Counts, of all its clients or of some."""
        classes = len(self._config.dataset.classes)
        infos = []
        for client in clients or self._clients:
            with _named(client):
                labels = np.asarray(self._training_rows(client).labels)
                if self._config.active is None:  # which begins with few rows on purpose
                    check_rows(client, labels, self._config.dataset)
            counts = np.bincount(labels, minlength=classes)
            told = tuple(counts.tolist()) if self._config.shares_class_counts(client) else ()
            infos.append(ClientInfo(client, len(labels), told, tuple((counts > 0).tolist())))
            if left_out := self._holdings.left_out(client):
                log.warning("%s: %s", client, left_out)
        return infos

    def local_update(self, client: str, state: GlobalState) -> ClientUpdate:
        round_id = state.round + 1
        shard = self._shard(client)
        result = self._method.local_update(client, state, shard, lambda: self._cancelled_round >= round_id)
        update = ClientUpdate(Receipt(client, round_id, len(shard), result.metrics), result.models)
        return transformed(self._config.client.transforms, update, state, self._config.seed)

    def cancel(self, round_id: int) -> None:
        """Give up this round and earlier ones; called from another thread while `local_update` runs."""
        self._cancelled_round = max(self._cancelled_round, round_id)

    def predict(self, state: GlobalState, split: str, part: int, parts: int) -> NDArray[np.float64]:
        """Log-probabilities on a part of the public held-out data: evaluation is shared among the actors."""
        if self._held_out is None:
            self._held_out = HeldOut(self._config, self._device)
        predict, split = asked(self._method, state.models, split)
        return self._held_out.log_probabilities(predict, split, part, parts)

    def answer(self, client: str, question: Question, state: GlobalState) -> Answer | None:
        """Sums over the rows that the client keeps back, under the network that would be exported; None: too few."""
        kept = self._holdings.kept_back(client)
        if len(kept) < FEWEST_ROWS:
            return None
        outputs = self._seen.of(client, state)
        if outputs is None:
            predict = network_predictor(self._method.student(state.models))
            outputs = outputs_on(predict, kept.images, self._config.dataset, self._device)
            self._seen.keep(client, state, outputs)
        return answer_to(question, outputs, np.asarray(kept.labels))

    def answers(
        self, question: Question, state: GlobalState, clients: Sequence[str] | None = None
    ) -> dict[str, Answer]:
        """`answer` of all its clients, or of some; of those that cannot, a line in the log."""
        found = {}
        for client in clients or self._clients:
            try:
                answer = self.answer(client, question, state)
            except Exception as error:  # whatever it is, it is missing from the sums and costs the run nothing
                log.warning("%s has not answered: %s: %s", client, type(error).__name__, error)
                continue
            if answer is not None:
                found[client] = answer
        return found

    def _shard(self, client: str) -> Shard:
        if client in self._shards:
            return self._shards[client]
        split = self._training_rows(client)
        augment = self._config.client.augment == "crop_flip"
        shard = make_shard(split.images, split.labels, self._config.dataset, self._device, augment)
        if len(self._clients) == 1:  # one that acts for a thousand would hold the whole data set in the end
            self._shards[client] = shard
        return shard

    def _training_rows(self, client: str) -> Split:
        """All that it holds; in active learning what is labelled by now."""
        split, active = self._holdings.of(client), self._config.active
        if active is None:
            return split
        unlabelled = make_shard(split.images, None, self._config.dataset, self._device)

        def ranking(state: GlobalState) -> Uncertainty:
            # Made when it is its turn: all rankings share the method's networks.
            return lambda rows: self._entropy(state, unlabelled, rows)

        if client not in self._labelled:
            rankings = [ranking(state) for state in self._acquisition_states]
            self._labelled[client] = labelled_rows(active, len(split), self._config.seed, client, rankings)
        rows = self._labelled[client]
        return Split(split.images[rows], split.labels[rows])

    def _entropy(self, state: GlobalState, unlabelled: Shard, rows: Indices) -> NDArray[np.float64]:
        """Predictive entropy of the client's own rows under a global model."""
        predict = self._method.predictor(state.models)
        parts = torch.from_numpy(rows).to(self._device).split(BATCH)
        return np.concatenate([entropy(predict(unlabelled.inputs(part)).cpu().numpy()) for part in parts])
