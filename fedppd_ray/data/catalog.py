"""What is known of every named data set without opening a file."""

from dataclasses import dataclass

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about a data set. `shape` is (channels, height, width)."""

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    family: str  # which of the paper's networks fit: "<family>_teacher", "<family>_student"
    # Renders itself in the shape of the data set it is held against (out-of-distribution sets only).
    adapts: bool = False


_GREY = (1, 28, 28)
_MNIST_MEAN, _MNIST_STD = (0.1307,), (0.3081,)

CATALOG: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo("mnist5k", DIGITS, _GREY, _MNIST_MEAN, _MNIST_STD, "mnist"),
        DatasetInfo("mnist", DIGITS, _GREY, _MNIST_MEAN, _MNIST_STD, "mnist"),
        DatasetInfo(
            "fashion_mnist",
            (
                "T-shirt/top",
                "trouser",
                "pullover",
                "dress",
                "coat",
                "sandal",
                "shirt",
                "sneaker",
                "bag",
                "ankle boot",
            ),
            _GREY,
            (0.2860,),
            (0.3530,),
            "mnist",
        ),
        DatasetInfo(
            "cifar10",
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            (3, 32, 32),
            (0.4914, 0.4822, 0.4465),
            (0.2470, 0.2435, 0.2616),
            "cifar10",
        ),
        DatasetInfo("glyphs", ("letter",), _GREY, (0.0,), (1.0,), "none", adapts=True),
    )
}
