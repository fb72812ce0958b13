"""The embedded table: scikit-learn's breast-cancer data (569 patients, 30 measurements), dealt to five hospitals.

The measurements are genuine (Wisconsin Diagnostic Breast Cancer); who treated whom is made up: hospitals of unequal
size and case mix, as a cancer centre and a screening clinic would have. It does not depend on a run's seed, so that
figures of different seeds compare.
"""

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.data.encoding import Columns
from fedppd_ray.data.parts import PartName
from fedppd_ray.seeding import numpy_generator_for

TARGET, HOSPITAL = "diagnosis", "hospital"
# name → share of the training patients, share of its patients that are malignant.
HOSPITALS = {
    "cancer centre": (0.34, 0.62),
    "city": (0.28, 0.34),
    "county": (0.18, 0.25),
    "practice": (0.08, 0.25),
    "screening": (0.12, 0.05),
}
_TEST = 142  # a quarter


def breast_cancer(part: PartName) -> Columns:
    """Columns of text, as a CSV file has them."""
    from sklearn.datasets import load_breast_cancer

    loaded = load_breast_cancer()
    order = numpy_generator_for(0, "breast_cancer/test").permutation(len(loaded.target))
    rows = np.sort(order[:_TEST]) if part == "test" else np.sort(order[_TEST:])
    columns = {str(name): _texts(loaded.data[rows, at]) for at, name in enumerate(loaded.feature_names)}
    columns[TARGET] = np.array([str(loaded.target_names[label]) for label in loaded.target[rows]], object)
    columns[HOSPITAL] = _hospitals(loaded.target[rows] == 0) if part == "train" else np.full(len(rows), "test", object)
    return columns


def _texts(values: NDArray[np.float64]) -> NDArray[np.object_]:
    return np.array([repr(float(value)) for value in values], object)


def _hospitals(malignant: NDArray[np.bool_]) -> NDArray[np.object_]:
    """Each hospital in turn takes its share of the malignant cases, then of the others; the city takes what is left."""
    generator = numpy_generator_for(0, "breast_cancer/hospitals")
    decks = {flag: list(generator.permutation(np.flatnonzero(malignant == flag))) for flag in (True, False)}
    owner = np.full(len(malignant), "city", object)
    for name, (share, sick) in HOSPITALS.items():
        if name == "city":
            continue
        size = round(share * len(malignant))
        for flag, count in ((True, round(size * sick)), (False, size - round(size * sick))):
            for _ in range(min(count, len(decks[flag]))):
                owner[decks[flag].pop()] = name
    return owner
