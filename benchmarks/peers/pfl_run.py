"""FedAvg by pfl: `SimulatedBackend`, rows in memory (`pfl.data.dataset.Dataset`), all clients every round.

PEERS_WORK=FOLDER python pfl_run.py NAME                                        one process
PEERS_WORK=FOLDER torchrun --standalone --nproc_per_node 2 pfl_run.py NAME      one process per core
"""

import os
import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

FOLDER, NAME = os.environ["PEERS_WORK"], sys.argv[1]
FIRST = int(os.environ.get("RANK", "0")) == 0  # only one process speaks


class Network(work.LeNet):
    """With what pfl asks of a network."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Asked for in the first round whatever one says; no forward pass, so it costs nothing."""
        return {"rows": Weighted(len(x), len(x))}


class Rounds(TrainingProcessCallback):
    """Says when a round begins, and knows which one it is."""

    current = 1

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._say()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.current = central_iteration + 2
        self._say()
        return False, Metrics()

    def _say(self) -> None:
        if FIRST:
            work.say_round(self.current)


class Ordered(Dataset):
    """A client's rows, in the order of the round."""

    def __init__(self, client: int, rounds: Rounds) -> None:
        super().__init__(raw_data=work.client_rows(FOLDER, client), user_id=str(client))
        self._client, self._rounds = client, rounds

    def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
        x, y = self.raw_data
        for rows in work.orders(FOLDER)[self._rounds.current - 1, self._client].split(batch_size or len(x)):
            yield [x[rows], y[rows]]


def main() -> None:
    task = work.read_work(FOLDER)
    torch.set_num_threads(1)  # as torchrun says to its processes; two threads gained nothing at batches of 40
    rounds = Rounds()
    clients = [Ordered(client, rounds) for client in range(task.clients)]
    data = FederatedDataset(clients.__getitem__, MinimizeReuseUserSampler(range(task.clients)))
    module = Network()
    module.load_state_dict(work.network(FOLDER).state_dict())
    model = PyTorchModel(
        module,
        local_optimizer_create=partial(torch.optim.SGD, weight_decay=task.weight_decay),
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds + 1,
            train_cohort_size=task.clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_learning_rate=task.rate, local_num_epochs=1, local_batch_size=task.batch_size),
        callbacks=[rounds],
    )
    if FIRST:
        work.finish(FOLDER, NAME, task, module)


if __name__ == "__main__":
    main()
