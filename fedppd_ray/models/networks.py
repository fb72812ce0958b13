"""The networks by name: the paper's, small ones for any shape, and those that users bring.

ReLU follows each convolution and linear layer but the last. Pooling comes before ReLU: max-pooling and ReLU
commute, and ReLU then touches a quarter of the values. Weights are Xavier-uniform, biases zero.
"""

import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedppd_ray.config.nouns import METHODS, NETWORKS, NetworkSpec, Shape
from fedppd_ray.config.schema import Config
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.models.layers import Dropout, pool_and_relu, seed_dropout
from fedppd_ray.models.own import adopt, try_network
from fedppd_ray.models.small import MLP, SmallCNN
from fedppd_ray.models.torchvision_import import import_torchvision
from fedppd_ray.models.weights import initialise, remember_start

__all__ = [
    "BUILT_IN",
    "NETWORKS",
    "Dropout",
    "FemnistStudent",
    "LeNet",
    "build_network",
    "check_networks",
    "first_weights",
    "initialise",
    "load_pretrained",
    "pool_and_relu",
    "seed_dropout",
]

_VECTOR = 8  # float32 numbers in an AVX2 register


def convolve_twice(x: Tensor, first: nn.Conv2d, second: nn.Conv2d) -> Tensor:
    """second(pool_and_relu(first(x))).

    Fewer maps in between than a vector register holds leave the CPU's kernels scalar tails, in pooling above all. Maps
    of zeros that fill it up change nothing and save an eighth of a step of the CIFAR-10 teacher (6 maps). To fill up
    10 or 20 maps does not help.
    """
    missing = _VECTOR - first.out_channels
    if missing <= 0 or first.bias is None:
        out: Tensor = second(pool_and_relu(first(x)))
        return out
    x = F.conv2d(x, F.pad(first.weight, (0, 0, 0, 0, 0, 0, 0, missing)), F.pad(first.bias, (0, missing)))
    return F.conv2d(pool_and_relu(x), F.pad(second.weight, (0, 0, 0, 0, 0, missing)), second.bias)


class LeNet(nn.Module):
    """Two valid 5×5 convolutions, each pooled by two, then linear layers."""

    def __init__(
        self,
        shape: Shape,
        channels: tuple[int, int],
        hidden: tuple[int, ...],
        classes: int,
        dropout: bool,
    ) -> None:
        super().__init__()
        first, second = channels
        self.conv1 = nn.Conv2d(shape[0], first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.conv_drop = Dropout(channels=True) if dropout else nn.Identity()
        self.fc_drop = Dropout() if dropout else nn.Identity()
        side = ((shape[1] - 4) // 2 - 4) // 2
        widths = (second * side * side, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.out = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = convolve_twice(x, self.conv1, self.conv2)
        x = pool_and_relu(self.conv_drop(x)).flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        out: Tensor = self.out(self.fc_drop(x))
        return out


class FemnistStudent(nn.Module):
    """Three same-padded 5×5 convolutions and two wide linear layers (6,045,792 parameters)."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 50, 5, padding=2)
        self.conv2 = nn.Conv2d(50, 100, 5, padding=2)
        self.conv3 = nn.Conv2d(100, 200, 5, padding=2)
        self.drop2 = Dropout(channels=True)
        self.drop3 = Dropout(channels=True)
        self.fc1 = nn.Linear(200 * 4 * 4, 1600)
        self.fc2 = nn.Linear(1600, 180)
        self.out = nn.Linear(180, classes)
        self.fc_drop1 = Dropout()
        self.fc_drop2 = Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = pool_and_relu(self.conv1(x))
        x = pool_and_relu(self.drop2(self.conv2(x)))
        x = F.pad(x, (0, 1, 0, 1))  # 7×7 to 8×8, so that the last pooling loses nothing
        x = pool_and_relu(self.drop3(self.conv3(x)))
        x = self.fc_drop1(F.relu(self.fc1(x.flatten(1))))
        x = self.fc_drop2(F.relu(self.fc2(x)))
        out: Tensor = self.out(x)
        return out


def _lenet(channels: tuple[int, int], hidden: tuple[int, ...], dropout: bool) -> Callable[..., nn.Module]:
    return lambda shape, classes: LeNet(shape, channels, hidden, classes, dropout)


def _resnet(depth: int) -> Callable[..., nn.Module]:
    def build(shape: Shape, classes: int) -> nn.Module:
        if shape[0] != 3:
            raise ValueError(f"resnet{depth} takes 3 channels, not {shape[0]}")
        import_torchvision()
        from torchvision import models

        module: nn.Module = getattr(models, f"resnet{depth}")(weights=None, num_classes=classes)
        return module

    return build


def _small_teacher(shape: Shape, classes: int, width: int = 16, **others: Any) -> nn.Module:
    return SmallCNN(shape, classes, width, **others)


def _mlp_teacher(shape: Shape, classes: int, hidden: Sequence[int] = (32, 32), **others: Any) -> nn.Module:
    return MLP(shape, classes, hidden, **others)


_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)

BUILT_IN: dict[str, NetworkSpec] = {
    "mnist_teacher": NetworkSpec(_GREY, _lenet((10, 20), (50,), dropout=True)),
    "mnist_student": NetworkSpec(_GREY, _lenet((20, 40), (100,), dropout=True)),
    "femnist_teacher": NetworkSpec(_GREY, _lenet((32, 64), (128,), dropout=True)),
    "femnist_student": NetworkSpec(_GREY, FemnistStudent),
    "cifar10_teacher": NetworkSpec(_COLOUR, _lenet((6, 16), (120, 84), dropout=False)),
    "cifar10_student": NetworkSpec(_COLOUR, _lenet((16, 16), (256, 128), dropout=False)),
    "resnet18": NetworkSpec(None, _resnet(18), channels=3, pretrained="ResNet18_Weights"),
    "resnet34": NetworkSpec(None, _resnet(34), channels=3, pretrained="ResNet34_Weights"),
    "small_cnn": NetworkSpec(None, SmallCNN),
    "mlp": NetworkSpec(None, MLP, images=False),
    # What `auto` takes where the paper has no network: a student larger than its teacher.
    "small_teacher": NetworkSpec(None, _small_teacher),
    "small_student": NetworkSpec(None, SmallCNN),
    "mlp_teacher": NetworkSpec(None, _mlp_teacher, images=False),
    "mlp_student": NetworkSpec(None, MLP, images=False),
}

for _name, _spec in BUILT_IN.items():
    NETWORKS.register(_name, _spec, __name__)


def build_network(
    name: str, shape: Shape, classes: int, args: Mapping[str, Any] | None = None, seed: int = 0
) -> nn.Module:
    """The named network with undefined weights: `initialise` or load them.

    `seed` is for weights that only a constructor sets, in networks that users bring.
    """
    spec = NETWORKS[name]
    # Constructors draw default weights from global random state; leave that state as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            module = spec.build(shape, classes, **(args or {}))
        except Exception as error:
            if name in BUILT_IN and not args:
                raise
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"network {name}: cannot be built for rows of {tuple(shape)} and {classes} classes with network_args "
                f"{dict(args or {})} ({type(error).__name__}: {reason})"
            ) from error
    if name in BUILT_IN:
        known: nn.Module = module
        return known
    adopted = adopt(module, f"network {name}")
    remember_start(adopted)
    return adopted


def check_networks(config: Config) -> None:
    """Try the networks that a user brings, and sizes that a user sets, before anything is started for them."""
    info = config.dataset
    for role, choice in METHODS[config.method].networks(config).items():
        name = info.network(role) if choice.network == "auto" else choice.network
        if name not in BUILT_IN or choice.network_args:
            build = partial(build_network, name, info.shape, len(info.classes), choice.network_args)
            try_network(f"{role}.network: {name}", build, info.shape, len(info.classes))


def first_weights(module: nn.Module, network: str, generator: torch.Generator, pretrained: bool = False) -> None:
    """The weights that a run starts from: `initialise`, or published ones under a freshly initialised last layer."""
    initialise(module, generator)
    if pretrained:
        load_pretrained(module, network)


def load_pretrained(module: nn.Module, network: str) -> None:
    """ImageNet weights and running statistics by torchvision, into all but the last layer (`fc`)."""
    published = NETWORKS[network].pretrained
    if published is None:
        raise ValueError(f"{network} has no published weights")
    import_torchvision()
    from torchvision import models

    weights = getattr(models, published).IMAGENET1K_V1
    try:
        tensors = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        place, reason = Path(torch.hub.get_dir()) / "checkpoints", " ".join(str(error).split())
        raise DataError(
            f"the pretrained weights of {network} could not be had ({reason}); put {weights.url} into {place}, "
            f"or set TORCH_HOME to the folder whose hub/checkpoints has them, or turn pretrained off"
        ) from None
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
    # Copies in place, so a module that is bound to a flat vector stays so. Only the last layer may be missing.
    missing, unexpected = module.load_state_dict(kept, strict=False)
    if unexpected or {name.split(".")[0] for name in missing} != {"fc"}:
        raise DataError(f"{weights.url}: does not fit {network}: {[*missing, *unexpected][:3]}")
