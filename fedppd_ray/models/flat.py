"""A module whose parameters, gradients and float buffers live in contiguous vectors.

The vector is [parameters | float buffers]: what travels, is averaged and is checkpointed. SGLD is then a few
fused vector operations and aggregation one weighted sum. Buffers policy: float buffers (running means and
variances of batch normalisation) are averaged like weights; integer buffers (batch counters, unused at a
fixed momentum) stay where they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedppd_ray.models.allocator import keep_freed_memory

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Slot:
    """Where one tensor lives in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Names, shapes and places; parameters first, then float buffers."""

    slots: tuple[Slot, ...]
    parameters: int  # numbers of the vector that are parameters
    size: int

    @staticmethod
    def of(module: nn.Module) -> "Layout":
        slots: list[Slot] = []
        at = 0

        def place(name: str, tensor: Tensor) -> None:
            nonlocal at
            slots.append(Slot(name, tuple(tensor.shape), at, at + tensor.numel()))
            at += tensor.numel()

        for name, parameter in module.named_parameters():
            place(name, parameter)
        parameters = at
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                place(name, buffer)
        return Layout(tuple(slots), parameters, at)

    def unpack(self, vector: Vector) -> dict[str, Vector]:
        """Named tensors, as views into the vector."""
        return {slot.name: vector[slot.start : slot.stop].reshape(slot.shape) for slot in self.slots}

    def pack(self, tensors: Mapping[str, Vector]) -> Vector:
        vector = np.empty(self.size, np.float32)
        for slot in self.slots:
            vector[slot.start : slot.stop] = np.asarray(tensors[slot.name], np.float32).reshape(-1)
        return vector


class FlatModel:
    """A module bound to one flat vector (`vector`) and one flat gradient (`gradient`)."""

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        keep_freed_memory()  # every process that computes with a network has one of these
        self.module = module.to(device)
        self.layout = Layout.of(module)
        self.vector = torch.empty(self.layout.size, device=device)
        self.gradient = torch.zeros(self.layout.parameters, device=device)
        self._bind()

    def _bind(self) -> None:
        parameters = dict(self.module.named_parameters())
        for slot in self.layout.slots:
            view = self.vector[slot.start : slot.stop].view(slot.shape)
            if slot.name in parameters:
                parameter = parameters[slot.name]
                view.copy_(parameter.data)
                parameter.data = view
                parameter.grad = self.gradient[slot.start : slot.stop].view(slot.shape)
            else:
                path, _, name = slot.name.rpartition(".")
                owner = self.module.get_submodule(path)
                view.copy_(owner.get_buffer(name))
                owner.register_buffer(name, view)

    @property
    def weights(self) -> Tensor:
        """The parameters alone, without buffers: what samplers and optimisers move."""
        return self.vector[: self.layout.parameters]

    def load(self, vector: Vector) -> None:
        """Copy a vector in. Never aliases it: it may be a read-only view that other processes share."""
        if vector.shape != (self.layout.size,):
            raise ValueError(f"a vector of shape {vector.shape} does not fit a model of {self.layout.size} numbers")
        if self.vector.device.type == "cpu":
            np.copyto(self.vector.numpy(), vector)
        else:
            self.vector.copy_(torch.from_numpy(np.array(vector, np.float32)))

    def export(self) -> Vector:
        """A copy of the vector, owned by the caller."""
        copy: Vector = self.vector.detach().cpu().numpy().copy()
        return copy

    def backward(self, loss: Tensor) -> Tensor:
        """Fill and return the flat gradient of `loss`."""
        self.gradient.zero_()
        torch.autograd.backward(loss)
        return self.gradient
