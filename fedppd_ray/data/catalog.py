"""What is known of every named data set without opening a file."""

from fedppd_ray.config.nouns import DATASETS, DatasetInfo, Shape
from fedppd_ray.config.table import SHIFTED

DIGITS = tuple("0123456789")
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
_MNIST_MEAN, _MNIST_STD = (0.1307,), (0.3081,)
_RESNETS = ("resnet18", "resnet34")

_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")

CATALOG: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo("mnist5k", DIGITS, GREY, _MNIST_MEAN, _MNIST_STD, "mnist"),
        DatasetInfo("mnist", DIGITS, GREY, _MNIST_MEAN, _MNIST_STD, "mnist"),
        DatasetInfo("fashion_mnist", _FASHION, GREY, (0.2860,), (0.3530,), "mnist"),
        DatasetInfo(
            "kmnist",
            ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
            GREY,
            (0.1918,),
            (0.3483,),
            "mnist",
        ),
        # Mean 0 and deviation 1: the networks see raw pixels in [0, 1], as the authors' did.
        DatasetInfo("femnist", tuple(_UPPER + _UPPER.lower()), GREY, (0.0,), (1.0,), "femnist", writers=True),
        DatasetInfo(
            "cifar10",
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            COLOUR,
            (0.4914, 0.4822, 0.4465),
            (0.2470, 0.2435, 0.2616),
            "cifar10",
        ),
        DatasetInfo(
            "cifar100",
            tuple(_CIFAR100.split()),
            COLOUR,
            (0.5071, 0.4865, 0.4409),
            (0.2673, 0.2564, 0.2762),
            "none",
            networks=_RESNETS,
        ),
        DatasetInfo("svhn", DIGITS, COLOUR, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), "cifar10"),
        DatasetInfo(SHIFTED, ("shifted row",), (1,), (), (), "none", adapts=True),
        DatasetInfo("glyphs", ("letter",), GREY, (0.0,), (1.0,), "none", adapts=True),
        DatasetInfo("noise", ("noise",), GREY, (0.0,), (1.0,), "none", adapts=True),
        DatasetInfo("letters", ("letter",), GREY, (0.0,), (1.0,), "none", adapts=True, files="femnist"),
    )
}
for _info in CATALOG.values():
    DATASETS.register(_info.name, _info, __name__)


def networks_for(shape: Shape) -> tuple[str, str] | None:
    """The paper's teacher and student for images of this shape, if it has any."""
    families: dict[Shape, str] = {GREY: "mnist", COLOUR: "cifar10"}
    family = families.get(shape)
    return (f"{family}_teacher", f"{family}_student") if family else None
