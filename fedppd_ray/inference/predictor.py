"""How a network becomes a predictive distribution."""

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedppd_ray.inference.scores import Outputs
from fedppd_ray.models.flat import FlatModel

# Normalised inputs → float64 log predictive probabilities.
Predictor = Callable[[Tensor], Tensor]

# Rows per forward pass. Parts of a split are cut at multiples of it, so that a row's batch, and with it every bit
# of its prediction, does not depend on how many processes share the work.
BATCH = 500


class NetworkPredictor:
    """One forward pass of one network: a predictor that has logits and features to show as well."""

    def __init__(self, model: FlatModel) -> None:
        model.module.eval()
        self._module = model.module

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        return torch.log_softmax(self._module(inputs).double(), 1)

    @torch.no_grad()
    def outputs(self, inputs: Tensor) -> Outputs:
        """The same pass, with all that it went through."""
        last = _last_layer(self._module)
        seen = None if last is None else _watched(last)
        logits = self._module(inputs).double()
        features = None if seen is None else seen.__dict__.pop("inputs", None)
        if last is None or last.out_features != logits.shape[1] or features is None or len(features) != len(logits):
            features = None  # its last layer is something else: no score can be made of that
        return Outputs(
            torch.log_softmax(logits, 1).cpu().numpy(),
            logits.cpu().numpy(),
            None if features is None else features.cpu().numpy(),
        )


def network_predictor(model: FlatModel) -> NetworkPredictor:
    """One forward pass of one network."""
    return NetworkPredictor(model)


def outputs_of(predict: Predictor, inputs: Tensor) -> Outputs:
    """What a predictor says of these inputs; of one that is no single network, its log-probabilities."""
    if isinstance(predict, NetworkPredictor):
        return predict.outputs(inputs)
    return Outputs(predict(inputs).cpu().numpy())


def _last_layer(module: nn.Module) -> nn.Linear | None:
    found = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return found[-1] if found else None


# One hook a layer, whoever asks how often; each thread sees the inputs of its own passes.
_WATCHED: "WeakKeyDictionary[nn.Module, threading.local]" = WeakKeyDictionary()


def _watched(layer: nn.Linear) -> threading.local:
    if layer not in _WATCHED:
        seen = threading.local()

        def note(_layer: nn.Module, arguments: tuple[Any, ...]) -> None:
            if not torch.is_grad_enabled():  # in training it would keep a graph alive
                seen.inputs = arguments[0]

        layer.register_forward_pre_hook(note)
        _WATCHED[layer] = seen
    return _WATCHED[layer]
