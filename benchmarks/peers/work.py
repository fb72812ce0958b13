"""The work that everybody does: rows, their order, the network and one client's local update, in plain PyTorch.

Written to a folder by compare.py, read by the programs of the peers, whose venvs have numpy and torch and not our
package. Rows are held as normalised float tensors: no peer is made to pay for image files or transforms.
"""

import json
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Work:
    """`rows` per client; every round is one local epoch of SGD on every client."""

    clients: int
    rows: int
    rounds: int
    batch_size: int
    rate: float
    weight_decay: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def save(self, folder: Path, **arrays: Any) -> None:
        (folder / "work.json").write_text(json.dumps(asdict(self)), encoding="utf-8")
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)


def read_work(folder: Path | str) -> Work:
    return Work(**json.loads((Path(folder) / "work.json").read_text(encoding="utf-8")))


def array(folder: Path | str, name: str) -> np.ndarray[Any, Any]:
    return np.load(Path(folder) / f"{name}.npy", mmap_mode="r")


def inputs(work: Work, images: np.ndarray[Any, Any]) -> Tensor:
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (work.mean, work.std))
    return (torch.from_numpy(np.array(images)).float() / 255 - mean) / std


@cache
def client_rows(folder: str, client: int) -> tuple[Tensor, Tensor]:
    """A client's inputs and labels, read once by a process and kept."""
    work = read_work(folder)
    labels = torch.from_numpy(np.array(array(folder, "labels")[client]))
    return inputs(work, array(folder, "images")[client]), labels


@cache
def orders(folder: str) -> Tensor:
    """rounds × clients × rows: in which order a client sees its rows."""
    return torch.from_numpy(np.array(array(folder, "orders")))


class LeNet(nn.Module):
    """The paper's CIFAR-10 teacher as it is usually written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.out = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = F.relu(self.fc2(x))
        out: Tensor = self.out(x)
        return out


def network(folder: Path | str) -> LeNet:
    """With the weights that everybody starts from."""
    module = LeNet()
    nn.utils.vector_to_parameters(torch.from_numpy(np.array(array(folder, "start"))), module.parameters())
    return module


def local_update(folder: str, work: Work, module: nn.Module, client: int, round_id: int) -> float:
    """One epoch of SGD, in place; returns the mean loss of the last batch."""
    x, y = client_rows(folder, client)
    optimiser = torch.optim.SGD(module.parameters(), lr=work.rate, weight_decay=work.weight_decay)
    loss = torch.zeros(())
    for rows in orders(folder)[round_id - 1, client].split(work.batch_size):
        optimiser.zero_grad()
        loss = F.cross_entropy(module(x[rows]), y[rows])
        loss.backward()
        optimiser.step()
    return loss.item()


@torch.no_grad()
def accuracy(folder: str, work: Work, module: nn.Module) -> float:
    """Percent of the held-out rows."""
    images, labels = array(folder, "test_images"), array(folder, "test_labels")
    right = 0
    for start in range(0, len(labels), 1000):
        found = module(inputs(work, images[start : start + 1000])).argmax(1).numpy()
        right += int((found == labels[start : start + 1000]).sum())
    return 100 * right / len(labels)


def say_round(round_id: int) -> None:
    """A round begins now; the monotonic clock is the machine's, so compare.py can subtract its own."""
    print(f"@round {round_id} {time.monotonic():.4f}", flush=True)


def finish(folder: str, name: str, work: Work, module: nn.Module) -> None:
    """After the last round: what was learnt, for comparison."""
    vector = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    np.save(Path(folder) / f"learnt_{name}.npy", vector)
    print(f"@accuracy {accuracy(folder, work, module):.4f}", flush=True)
