"""Write a folder of 16-bit PNG scans: a bright disc somewhere (`nodule`), or none (`clear`)."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 48


def scan(generator: np.random.Generator, nodule: bool) -> Image.Image:
    pixels = generator.normal(12_000, 2_500, (SIZE, SIZE))
    if nodule:
        y, x = generator.integers(10, SIZE - 10, 2)
        lines, columns = np.mgrid[:SIZE, :SIZE]
        pixels += 9_000 * np.exp(-((lines - y) ** 2 + (columns - x) ** 2) / 18)
    return Image.fromarray(np.clip(pixels, 0, 65_535).astype(np.uint16))


def main(root: Path) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    for part, count in (("train", 80), ("test", 30)):
        for name in ("clear", "nodule"):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                scan(generator, name == "nodule").save(folder / f"{number:03d}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
