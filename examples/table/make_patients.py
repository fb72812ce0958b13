"""Write train.csv, test.csv and new.csv: numbers, a category, missing values, and whose row it is."""

import csv
import sys
from pathlib import Path

import numpy as np

SITES = ("north", "south", "west")


def patient(generator: np.random.Generator, site: str) -> dict[str, object]:
    age, ward = generator.normal(55, 14), ("a", "b", "icu")[generator.integers(3)]
    risk = 0.08 * (age - 55) + 1.5 * (ward == "icu") + 0.5 * (site == "west") - 0.5
    ill = generator.random() < 1 / (1 + np.exp(-2 * risk))
    lab = "" if generator.random() < 0.15 else round(float(generator.normal(4 + 1.5 * ill, 1)), 2)
    return {"age": round(float(age), 1), "ward": ward, "lab": lab, "site": site, "outcome": "ill" if ill else "well"}


def main(root: Path) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    root.mkdir(parents=True, exist_ok=True)
    columns = ["age", "ward", "lab", "site", "outcome"]
    for name, count, kept in (("train", 600, columns), ("test", 200, columns), ("new", 5, columns[:3])):
        with (root / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, kept, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(patient(generator, SITES[number % len(SITES)]) for number in range(count))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
