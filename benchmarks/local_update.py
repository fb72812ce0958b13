"""How fast is a client's local update? One client, one epoch of teacher and student, on one core, in turns:

1. ours: `FedPPD.local_update`;
2. a plain loop in the usual manner: torchvision's transforms on PIL images, a DataLoader, ReLU right after each
   convolution, torch.optim.SGD, noise drawn parameter by parameter.

    python benchmarks/local_update.py [--config configs/cifar10.yaml] [--repeats 7] [--profile]

Both do the same arithmetic; first it is checked that one step of each moves the same weights alike. Ours does a
little more: it also estimates the log posterior. Each has a process of its own; they take turns, so that a busy
machine hurts both alike; medians of CPU time are shown. The rows come from the data root (`FEDPPD_DATA`); without it,
random images of the same shape take their place, which changes no amount of work.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_PROJECT))

from fedppd_ray.bayes.distill import student_step  # noqa: E402
from fedppd_ray.bayes.sgld import sgld_step  # noqa: E402
from fedppd_ray.config.file import load_config  # noqa: E402
from fedppd_ray.config.schema import Config, for_rows  # noqa: E402
from fedppd_ray.data.holdings import Holdings  # noqa: E402
from fedppd_ray.data.parts import Split  # noqa: E402
from fedppd_ray.data.rows import ImageShard  # noqa: E402
from fedppd_ray.errors import DataError  # noqa: E402
from fedppd_ray.federation.types import GlobalState, Models  # noqa: E402
from fedppd_ray.methods.fedppd import FedPPD  # noqa: E402
from fedppd_ray.models.networks import LeNet  # noqa: E402
from fedppd_ray.models.torchvision_import import import_torchvision  # noqa: E402

CLIENT = "client-00"


# --- the plain loop --------------------------------------------------------------------------------------------


class PlainNetwork(nn.Module):
    """The same network as the paper draws it: ReLU right after each convolution, then pooling."""

    def __init__(self, like: LeNet) -> None:
        super().__init__()
        first, second = like.conv1, like.conv2
        self.conv1 = nn.Conv2d(first.in_channels, first.out_channels, 5)
        self.conv2 = nn.Conv2d(second.in_channels, second.out_channels, 5)
        self.hidden = nn.ModuleList(nn.Linear(layer.in_features, layer.out_features) for layer in _linear(like.hidden))
        self.out = nn.Linear(like.out.in_features, like.out.out_features)
        dropout = not isinstance(like.conv_drop, nn.Identity)
        self.conv_drop = nn.Dropout2d() if dropout else nn.Identity()
        self.fc_drop = nn.Dropout() if dropout else nn.Identity()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv_drop(self.conv2(x))))
        x = torch.flatten(x, 1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        out: Tensor = self.out(self.fc_drop(x))
        return out


def _linear(layers: nn.ModuleList) -> list[nn.Linear]:
    return [layer for layer in layers if isinstance(layer, nn.Linear)]


class PlainImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """One PIL image at a time through torchvision's transforms."""

    def __init__(self, split: Split, config: Config) -> None:
        import_torchvision()
        from PIL import Image
        from torchvision import transforms

        info = config.dataset
        augment: list[Any] = []
        if config.client.augment == "crop_flip":
            augment = [transforms.RandomCrop(info.shape[1], padding=4), transforms.RandomHorizontalFlip()]
        normalise = [transforms.ToTensor(), transforms.Normalize(info.mean, info.std)]
        self._transform = transforms.Compose([*augment, *normalise])
        pixels = split.images.transpose(0, 2, 3, 1)
        self._pixels = np.ascontiguousarray(pixels[..., 0] if info.shape[0] == 1 else pixels)
        self._labels = split.labels
        self._to_image = Image.fromarray

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image: Tensor = self._transform(self._to_image(self._pixels[row]))
        return image, int(self._labels[row])


class PlainClient:
    def __init__(self, config: Config, split: Split, like: FedPPD, start: Models) -> None:
        self.config, rows = config, len(split)
        self._loader = torch.utils.data.DataLoader(PlainImages(split, config), config.client.batch_size, shuffle=True)
        networks = {}
        for role, model in like.networks_by_role.items():
            if not isinstance(model.module, LeNet):
                raise SystemExit("the plain loop knows the LeNets of MNIST, FEMNIST (teacher) and CIFAR-10 only")
            networks[role] = PlainNetwork(model.module)
            nn.utils.vector_to_parameters(torch.from_numpy(start[role].copy()), networks[role].parameters())
        self.teacher, self.student = networks["teacher"], networks["student"]
        rate = config.teacher.rate
        self._noise = (rate * for_rows(config.teacher.temperature, rows) / rows) ** 0.5
        decay = for_rows(config.teacher.prior_precision, rows) / rows
        self.teach = torch.optim.SGD(self.teacher.parameters(), lr=rate / 2, weight_decay=decay)
        settings = config.student
        self.learn = torch.optim.SGD(self.student.parameters(), lr=settings.rate, weight_decay=settings.weight_decay)

    def epoch(self) -> float:
        """A teacher epoch by SGLD, then a student epoch against its last iterate; returns the mean loss."""
        self.teacher.train()
        for images, labels in self._loader:
            self.teacher_step(images, labels)
            with torch.no_grad():
                for parameter in self.teacher.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=self._noise)
        self.teacher.eval()
        self.student.train()
        total = 0.0
        for images, _ in self._loader:
            total += self.student_step(images + self.config.student.input_noise * torch.randn_like(images))
        return total / len(self._loader)

    def teacher_step(self, images: Tensor, labels: Tensor) -> None:
        self.teach.zero_grad()
        F.cross_entropy(self.teacher(images), labels).backward()
        self.teach.step()

    def student_step(self, images: Tensor) -> float:
        with torch.no_grad():
            targets = torch.softmax(self.teacher(images), 1)
        self.learn.zero_grad()
        loss = -(targets * torch.log_softmax(self.student(images), 1)).sum(1).mean()
        loss.backward()
        self.learn.step()
        return loss.item()


# --- the same steps? -------------------------------------------------------------------------------------------


def largest_difference(config: Config, split: Split) -> float:
    """After one noiseless teacher step and one student step of both on one batch, between any two weights."""
    method = FedPPD(config)
    start = method.initial_models()
    plain = PlainClient(config, split, method, start)
    shard = ImageShard(split.images, split.labels, config.dataset)
    rows = torch.arange(min(config.client.batch_size, len(split)))
    inputs, labels = shard.inputs(rows), torch.from_numpy(np.array(split.labels))[rows]
    teacher, student = (method.networks_by_role[role] for role in ("teacher", "student"))
    for network in (teacher.module, student.module, plain.teacher, plain.student):
        network.eval()  # dropout draws from other streams
    teacher.load(start["teacher"])
    student.load(start["student"])
    sgld_step(
        teacher.weights,
        teacher.backward(F.cross_entropy(teacher.module(inputs), labels)),
        step=config.teacher.rate,
        rows=len(split),
        temperature=0.0,
        prior_precision=for_rows(config.teacher.prior_precision, len(split)),
        generator=torch.Generator(),
    )
    with torch.no_grad():
        targets = torch.softmax(teacher.module(inputs), 1)
    student_step(student, inputs, targets, config.student.rate, config.student.weight_decay)
    plain.teacher_step(inputs.contiguous(), labels)
    plain.student_step(inputs.contiguous())
    pairs = ((teacher, plain.teacher), (student, plain.student))
    theirs = [nn.utils.parameters_to_vector(network.parameters()).detach() for _, network in pairs]
    return max(float((ours.weights - flat).abs().max()) for (ours, _), flat in zip(pairs, theirs, strict=True))


# --- what is measured ------------------------------------------------------------------------------------------


def client_rows(config: Config) -> tuple[Split, str]:
    """The first client's rows, and what they are."""
    try:
        return Holdings(config, [CLIENT]).of(CLIENT), config.data.name
    except DataError as error:
        print(f"{error}\nWithout it: random images of the same shape; the amount of work is the same.\n")
    generator = np.random.default_rng(0)
    info, rows = config.dataset, config.data.partition.rows_per_client or 2100
    images = generator.integers(0, 256, (rows, *info.shape), np.uint8)
    return Split(images, generator.integers(0, len(info.classes), rows)), f"random images shaped like {info.name}"


def use_one_core() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def seconds(epoch: Callable[[], object]) -> float:
    """Of this process on its core: the turns that other processes take there do not count."""
    started = time.process_time()
    epoch()
    return time.process_time() - started


def profile_of(epoch: Callable[[], object]) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        epoch()
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    lines = [f"{total / 1e6:.2f} s in torch's operators, of which"]
    for event in events[:12]:
        share = event.self_cpu_time_total / total
        lines.append(f"  {share:6.1%} {event.self_cpu_time_total / 1e3:8.0f} ms {event.count:7,} calls  {event.key}")
    return "\n".join(lines)


def contender(name: str, config: Config, split: Split, pipe: Connection) -> None:
    """One of the two, in a process of its own: what one tells the allocator must not help the other."""
    use_one_core()
    method = FedPPD(config)
    state = GlobalState(0, method.initial_models())
    if name == "ours":
        shard = ImageShard(split.images, split.labels, config.dataset, augment=config.client.augment == "crop_flip")
        epoch: Callable[[], object] = lambda: method.local_update(CLIENT, state, shard, lambda: False)  # noqa: E731
    else:
        epoch = PlainClient(config, split, method, state.models).epoch
    while (wanted := pipe.recv()) != "end":
        pipe.send(profile_of(epoch) if wanted == "profile" else seconds(epoch))


def measure(config: Config, repeats: int, with_profile: bool) -> None:
    split, what = client_rows(config)
    print(f"one client, one epoch of teacher and student, {len(split):,} rows of {what}, on one core")
    print(f"one step of each on one batch: largest difference of two weights {largest_difference(config, split):.0e}\n")
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in ("plain", "ours"):
        pipes[name], theirs = spawn.Pipe()
        spawn.Process(target=contender, args=(name, config, split, theirs), daemon=True).start()

    def ask(name: str, what: str) -> Any:
        pipes[name].send(what)
        return pipes[name].recv()

    for name in pipes:
        ask(name, "epoch")  # warms up
    turns = [{name: ask(name, "epoch") for name in pipes} for _ in range(repeats)]
    _print_table(turns, len(split))
    if with_profile:
        for name in pipes:
            print(f"\n{name}: {ask(name, 'profile')}")
    for pipe in pipes.values():
        pipe.send("end")


def _print_table(turns: list[dict[str, float]], rows: int) -> None:
    print(f"{'CPU time':12}{'median s':>10}{'best s':>10}{'rows/s':>10}")
    for name, title in (("plain", "plain loop"), ("ours", "ours")):
        taken = [turn[name] for turn in turns]
        middle = statistics.median(taken)
        print(f"{title:12}{middle:>10.3f}{min(taken):>10.3f}{rows / middle:>10,.0f}")
    ratios = [turn["plain"] / turn["ours"] for turn in turns]
    print(f"\nplain / ours: {statistics.median(ratios):.2f}  (each turn: {', '.join(f'{r:.2f}' for r in ratios)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=_PROJECT / "configs" / "cifar10.yaml")
    parser.add_argument("--repeats", type=int, help="turns of each; 7, in the short version 3")
    parser.add_argument("--short", action="store_true", help="fewer turns: half a minute, less exact")
    parser.add_argument("--profile", action="store_true", help="also print where torch spends the time, for both")
    arguments = parser.parse_args()
    repeats = arguments.repeats or (3 if arguments.short else 7)
    measure(load_config(arguments.config, ["client.epochs=1"]), repeats, arguments.profile)


if __name__ == "__main__":
    main()
