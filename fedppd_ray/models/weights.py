"""The weights that a network starts from: drawn from one generator, for every layer that has any.

Convolutions and linear layers are Xavier-uniform with zero biases, normalisations start at identity, embeddings are
standard normal. A layer that is not known here draws its own weights (`reset_parameters`) under a seed; parameters
that no layer resets (`self.token = nn.Parameter(…)`) keep what the constructor gave them, which `build_network` seeds.
A network that sets `own_initialisation = True` keeps the constructor's weights throughout.
"""

import torch
from torch import Tensor, nn

_XAVIER = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Bilinear),
)
# Their `reset_parameters` draws nothing.
_AT_IDENTITY = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
)
_START = "_fedppd_start"  # where a network remembers what its constructor gave it


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """First weights, in place: a module that is bound to a flat vector stays so."""
    kept: dict[str, Tensor] = module.__dict__.get(_START, {})
    parameters = dict(module.named_parameters())
    for name, value in kept.items():
        parameters[name].copy_(value)
    if _keeps_own(module):
        return
    for part in module.modules():
        if isinstance(part, _XAVIER):
            nn.init.xavier_uniform_(part.weight, generator=generator)
            if part.bias is not None:
                part.bias.zero_()
        elif isinstance(part, _AT_IDENTITY):
            part.reset_parameters()
        elif isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.weight.normal_(generator=generator)
            if part.padding_idx is not None:
                part.weight[part.padding_idx].zero_()
        elif isinstance(part, nn.MultiheadAttention):
            _attention(part, generator)
        elif _has_own_parameters(part) and hasattr(part, "reset_parameters"):
            _reset_seeded(part, generator)


def remember_start(module: nn.Module) -> None:
    """Note the parameters that only the constructor sets: a network is bound and trained before it starts again."""
    for name, part in module.named_modules():
        if not _keeps_own(module) and (_is_known(part) or hasattr(part, "reset_parameters")):
            continue
        for leaf, parameter in part.named_parameters(name, recurse=False):
            module.__dict__.setdefault(_START, {})[leaf] = parameter.detach().clone()


def _keeps_own(module: nn.Module) -> bool:
    return bool(getattr(module, "own_initialisation", False))


def _is_known(part: nn.Module) -> bool:
    return isinstance(part, (*_XAVIER, *_AT_IDENTITY, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention))


def _has_own_parameters(part: nn.Module) -> bool:
    return any(True for _ in part.parameters(recurse=False))


def _attention(part: nn.MultiheadAttention, generator: torch.Generator) -> None:
    """Its output projection is a linear layer of its own."""
    for name, parameter in part.named_parameters(recurse=False):
        if name == "in_proj_bias":
            parameter.zero_()
        elif name in ("bias_k", "bias_v"):
            nn.init.xavier_normal_(parameter, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)


def _reset_seeded(part: nn.Module, generator: torch.Generator) -> None:
    """A layer's own initialisation draws from global random state: give it a seed, and leave the state as it was."""
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        reset = getattr(part, "reset_parameters")  # noqa: B009 - nn.Module does not declare it
        reset()
