"""Prediction sets of a finished run: coverage and size by method and confidence, on its test rows.

    python benchmarks/prediction_sets.py RUN

The thresholds come from the run's calibration rows, at its temperature, whatever `evaluation.conformal` says: cards of
earlier versions have none.
"""

import sys
from pathlib import Path

from fedppd_ray.config.conformal import ConformalConfig
from fedppd_ray.evaluation.sets import calibrated_sets, set_figures
from fedppd_ray.inference.abstention import temperature_of
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import network_predictor
from fedppd_ray.inference.temperature import fit_temperature, scaled
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.store import RunStore


def main(run: str) -> None:
    store = RunStore(Path(run))
    config, clients = store.config(), store.clients() if store.has_clients() else []
    card, model = read_student(Path(run))
    held_out, predict, classes = HeldOut(config), network_predictor(model), card["classes"]
    known, labels = held_out.log_probabilities(predict, "calibration"), held_out.labels("calibration")
    temperature = temperature_of(card) if "temperature" in card else fit_temperature(known, labels)
    seen = scaled(held_out.log_probabilities(predict, "test"), temperature)
    right = 100 * float((seen.argmax(axis=1) == held_out.labels("test")).mean())
    print(f"{config.name}: {len(labels)} calibration rows, {len(seen)} test rows, accuracy {right:.1f} %")
    print("| method | confidence | coverage | mean size | worst class | worst client |\n|---|---|---|---|---|---|")
    for method in ("lac", "aps", "raps"):
        for confidence in (0.8, 0.9, 0.95, 0.98):
            settings = ConformalConfig.model_validate({"method": method, "confidence": confidence})
            entry = calibrated_sets(settings, scaled(known, temperature), labels, classes, clients)
            found = set_figures({"conformal": entry, "classes": classes}, seen, held_out.labels("test"), clients)
            worst = [
                f"{min(one['coverage'] for one in found[key].values()):.1f} %" if key in found else "–"
                for key in ("classes", "sites")
            ]
            cells = [method, f"{100 * confidence:g} %", f"{found['coverage']:.1f} %", f"{found['size']:.2f}", *worst]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1])
