"""Logistic regression beside `configs/hospital.yaml`: on all hospitals' rows together, and on each hospital's alone.

    python benchmarks/hospital_baselines.py

The rows, the encoding, the calibration and the test patients are those of the configuration. Prints accuracy, NLL, ECE,
how many patients are answered with the threshold that calibration rows set for 95 %, and how many of these rightly; a
hospital's own model is scored on the same test patients.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression

_PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_PROJECT))

from fedppd_ray.config.file import load_config  # noqa: E402
from fedppd_ray.config.schema import client_ids  # noqa: E402
from fedppd_ray.data.holdings import Holdings, dataset_of  # noqa: E402
from fedppd_ray.evaluation.metrics import metrics_of  # noqa: E402
from fedppd_ray.inference.held_out import HeldOut  # noqa: E402
from fedppd_ray.inference.scores import ENTROPY  # noqa: E402


def main() -> None:
    config = load_config(_PROJECT / "configs" / "hospital.yaml")
    test, known = dataset_of(config).test, HeldOut(config).images("calibration")
    clients = client_ids(config.federation.clients)
    splits = [Holdings(config, [client]).of(client) for client in clients]
    table = config.data.table
    names = table.clients if table else clients
    pooled = (np.concatenate([split.images for split in splits]), np.concatenate([split.labels for split in splits]))
    rows = {"pooled": pooled} | {name: (split.images, split.labels) for name, split in zip(names, splits, strict=True)}
    for name, (values, labels) in rows.items():
        model = LogisticRegression(max_iter=5000).fit(values, labels)
        seen, held = (np.log(np.clip(model.predict_proba(part), 1e-12, 1)) for part in (test.images, known))
        found = metrics_of(seen, np.asarray(test.labels))
        answered = ENTROPY(seen) <= ENTROPY.threshold(ENTROPY(held), config.evaluation.coverage, seen.shape[1])
        right = (seen.argmax(axis=1) == test.labels)[answered].mean()
        figures = f"accuracy {found.accuracy:.1f} %  NLL {found.nll:.3f}  ECE {found.ece:.1f} %"
        figures += f"  answers {100 * answered.mean():.1f} %, right in {100 * right:.1f} %"
        print(f"{name:14} {len(labels):4} rows  {figures}")


if __name__ == "__main__":
    main()
