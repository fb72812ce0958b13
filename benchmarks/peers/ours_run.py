"""FedAvg by fedppd_ray, as `fedppd train` runs it: one actor per core, or one process without Ray.

PEERS_WORK=FOLDER python ours_run.py NAME [--serial]
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import work

import fedppd_ray as fp
from fedppd_ray.runs.store import RunStore

FOLDER, NAME = Path(os.environ["PEERS_WORK"]), sys.argv[1]


class Rounds(fp.Observer):
    def round_started(self, round_id: int, selected: Sequence[str]) -> None:
        work.say_round(round_id)


def main() -> None:
    config, out = fp.load_config(FOLDER / "config.yaml"), FOLDER / f"run_{NAME}"
    run = fp.train(config, out, observer=Rounds(), serial="--serial" in sys.argv)
    state = RunStore(out).resume(config)
    np.save(FOLDER / f"learnt_{NAME}.npy", state.models["model"])
    print(f"@accuracy {run.metrics()[-1]['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
