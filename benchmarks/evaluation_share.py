"""Do evaluation and export get in the way? Their share of a run's rounds, on real configurations.

    python benchmarks/evaluation_share.py [CONFIG ...] [--short] [--json FILE]

By default configs/quickstart.yaml, and configs/cifar10_small.yaml where CIFAR-10 is under the data root. Whole runs
are cut to two intervals of `evaluation.every` (at least four rounds), in the short version one (at least two).
Prediction on the held-out rows, the scores, and the export of the student count as evaluation; the rest of a round is
the clients', the server's and the checkpoint's.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from harness import PROJECT, Silent, local_ray, parser_of, report, warn_of_company

from fedppd_ray.config.file import load_config
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.data.holdings import prepare_data
from fedppd_ray.errors import DataError
from fedppd_ray.evaluation.metrics import Metrics
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.runs.store import RunStore
from fedppd_ray.runs.training import Training
from fedppd_ray.runtime.ray_executor import RayExecutor

DEFAULT = [PROJECT / "configs" / "quickstart.yaml", PROJECT / "configs" / "cifar10_small.yaml"]
LIMIT = 0.05


class Timed(Training):
    """Training that looks at the clock around its evaluation and its export."""

    evaluating = exporting = 0.0

    def _evaluate(self, round_id: int) -> Metrics | None:
        began = time.monotonic()
        scores = super()._evaluate(round_id)
        self.evaluating += time.monotonic() - began
        return scores

    def _export(self, state: GlobalState, scores: Metrics) -> None:
        began = time.monotonic()
        super()._export(state, scores)
        self.exporting += time.monotonic() - began


class Rounds(Silent):
    seconds = 0.0

    def round_started(self, *_: Any) -> None:
        self._began = time.monotonic()

    def round_finished(self, _record: dict[str, Any]) -> None:
        self.seconds += time.monotonic() - self._began


def measure(config: Config) -> dict[str, float]:
    rounds = Rounds()
    with local_ray(), tempfile.TemporaryDirectory() as folder:
        executor = RayExecutor(config, client_ids(config.federation.clients))
        store = RunStore(Path(folder) / "run")
        store.create(config)
        training = Timed(config, store, executor, rounds)
        training.run_rounds(None)
        executor.close()
    return {
        "rounds": config.federation.rounds,
        "round_s": rounds.seconds / config.federation.rounds,
        "evaluation": training.evaluating / rounds.seconds,
        "export": training.exporting / rounds.seconds,
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path, nargs="*", default=DEFAULT)
    options = parser.parse_args()
    warn_of_company()
    result: dict[str, Any] = {}
    print(f"{'configuration':24}{'rounds':>8}{'round s':>10}{'evaluation':>12}{'export':>9}{'together':>10}")
    for file in options.config:
        every = load_config(file).evaluation.every
        rounds = max(2, every) if options.short else max(4, 2 * every)
        config = load_config(file, [f"federation.rounds={rounds}"])
        try:
            prepare_data(config)
        except DataError as error:
            print(f"{config.name:24}left out: {error}")
            continue
        row = result[config.name] = measure(config)
        share = row["evaluation"] + row["export"]
        print(
            f"{config.name:24}{row['rounds']:>8}{row['round_s']:>10.2f}{row['evaluation']:>11.1%} "
            f"{row['export']:>8.1%} {share:>9.1%}{'' if share < LIMIT else '   above 5 %'}",
            flush=True,
        )
    report(result, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
