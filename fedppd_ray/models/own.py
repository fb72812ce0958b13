"""A network that users bring: what must hold of it before the first round, and how its dropout is seeded.

Bits may depend on nothing but the configuration, so that no layer may draw from global random state. Ordinary dropout
layers are replaced by seeded ones; whatever else draws is found by a trial and refused.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import activation
from torch.nn.modules import dropout as ordinary
from torch.nn.parameter import is_lazy

from fedppd_ray.errors import ConfigError
from fedppd_ray.models.layers import Dropout, seed_dropout
from fedppd_ray.models.weights import initialise

log = logging.getLogger(__name__)

_BY_CHANNEL = (ordinary.Dropout1d, ordinary.Dropout2d, ordinary.Dropout3d)
_NOT_REPLACED = (ordinary.AlphaDropout, ordinary.FeatureAlphaDropout, activation.RReLU)
_ROWS = 2  # of a trial; batch normalisation needs more than one


def adopt(module: object, name: str) -> nn.Module:
    """The module as it is trained: seeded dropout, and parameters that fit into one float32 vector."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{name}: made a {type(module).__name__}, not a torch.nn.Module")
    _replace_dropout(module, name)
    _check_parameters(module, name)
    return module


def _replace_dropout(module: nn.Module, name: str) -> None:
    seeded: dict[nn.Module, Dropout] = {}
    for path, parent in list(module.named_modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, _NOT_REPLACED):
                raise ConfigError(
                    f"{name}: {type(child).__name__} ({_joined(path, child_name)}) draws from global random state, so "
                    f"that no run could be repeated; use fedppd_ray.models.networks.Dropout instead"
                )
            if isinstance(child, (ordinary.Dropout, *_BY_CHANNEL)):
                new = seeded.setdefault(child, Dropout(child.p, channels=isinstance(child, _BY_CHANNEL)))
                setattr(parent, child_name, new)
    if seeded:
        log.info("%s: %d dropout layer(s) replaced by seeded ones", name, len(seeded))


def _check_parameters(module: nn.Module, name: str) -> None:
    if any(is_lazy(tensor) for tensor in module.parameters()):
        raise ConfigError(
            f"{name}: has lazy layers, whose sizes nobody knows yet; give their sizes (nn.Linear(in, out))"
        )
    if not any(True for _ in module.parameters()):
        raise ConfigError(f"{name}: has no parameters to train")
    for kind, tensors in (("weight", module.named_parameters()), ("buffer", module.named_buffers())):
        for path, tensor in tensors:
            numbers = tensor.is_floating_point() or tensor.is_complex()
            if tensor.dtype != torch.float32 and (numbers or kind == "weight"):
                raise ConfigError(f"{name}: {kind} {path} is {tensor.dtype}, not float32; make it so with .float()")
            if kind == "weight" and not tensor.requires_grad:
                raise ConfigError(
                    f"{name}: weight {path} is frozen (requires_grad=False), but a sampler moves every weight; make it "
                    f"a buffer with register_buffer, which stays as it is"
                )


def try_network(name: str, build: Callable[[], nn.Module], shape: Sequence[int], classes: int) -> None:
    """Refuse, before the first round, a network that would fail in it or whose bits could not be repeated."""
    module = build()
    generator = torch.Generator().manual_seed(0)
    initialise(module, generator)
    _check_finite(module, name)
    inputs = _inputs(shape, generator)
    module.eval()
    with torch.no_grad():
        out = _forward(module, inputs, name)
    if not isinstance(out, Tensor) or out.shape != (_ROWS, classes):
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(
            f"{name}: answers rows of {tuple(inputs.shape)} with {found}; it must be {(_ROWS, classes)}: one score per "
            f"class, before any softmax"
        )
    _check_training(copy.deepcopy(module), inputs, name, generator)


def _check_training(module: nn.Module, inputs: Tensor, name: str, generator: torch.Generator) -> None:
    module.train()
    seed_dropout(module, generator)
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        out = _forward(module, inputs, name)
        drawn = not torch.equal(before, torch.get_rng_state())
    if drawn:
        raise ConfigError(
            f"{name}: its forward pass draws from global random state (F.dropout, torch.rand, attention or recurrent "
            f"layers with dropout above 0), so that no run could be repeated; use the layer "
            f"fedppd_ray.models.networks.Dropout, which is seeded"
        )
    if not out.requires_grad:
        raise ConfigError(f"{name}: its output does not depend on its weights (no_grad or detach in forward?)")


def _check_finite(module: nn.Module, name: str) -> None:
    for path, parameter in module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ConfigError(
                f"{name}: weight {path} starts as inf or NaN (torch.empty?); fill it in the constructor, or in "
                f"reset_parameters of its layer"
            )


def _inputs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """As a shard shows them: images with their channels last in memory."""
    if len(shape) != 3:
        return torch.randn(_ROWS, *shape, generator=generator)
    channels, height, width = shape
    return torch.randn(_ROWS, height, width, channels, generator=generator).permute(0, 3, 1, 2)


def _forward(module: nn.Module, inputs: Tensor, name: str) -> Any:
    try:
        return module(inputs)
    except Exception as error:  # whatever the user's code raises is theirs to mend: say where, in one line
        reason = " ".join(str(error).split())[:300]
        hint = ""
        if "view size is not compatible" in reason:
            hint = "; images lie with their channels last: use flatten(1) or reshape instead of view"
        raise ConfigError(
            f"{name}: its forward pass fails on rows of {tuple(inputs.shape)} ({type(error).__name__}: {reason}){hint}"
        ) from error


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
