"""FedAvg by Flower's Simulation Runtime: one actor per core (`client_resources.num_cpus: 1`), all clients every round.

PEERS_WORK=FOLDER python flower_run.py NAME CORES
"""

import os
import sys

import work
from flower_client import app as client_app
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

FOLDER, NAME, CORES = os.environ["PEERS_WORK"], sys.argv[1], int(sys.argv[2])
server_app = ServerApp()


class Timed(FedAvg):
    def configure_train(self, server_round, *rest):  # type: ignore[no-untyped-def]
        work.say_round(server_round)
        return super().configure_train(server_round, *rest)


@server_app.main()
def main(grid: Grid, _context: Context) -> None:
    task = work.read_work(FOLDER)
    module = work.network(FOLDER)
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=task.clients, min_available_nodes=task.clients)
    result = strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=task.rounds)
    module.load_state_dict(result.arrays.to_torch_state_dict())
    work.finish(FOLDER, NAME, task, module)


if __name__ == "__main__":
    backend = {"init_args": {"num_cpus": CORES}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, work.read_work(FOLDER).clients, backend_config=backend)
