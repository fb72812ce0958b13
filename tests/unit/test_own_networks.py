"""Networks that users bring: imported where they may be, tried before the first round, and their bits hold."""

import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from fedppd_ray.config import own_networks
from fedppd_ray.config.file import load_config, parse_config
from fedppd_ray.config.nouns import NETWORKS
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.observer import Observer
from fedppd_ray.models.networks import Dropout, build_network, check_networks, initialise, seed_dropout
from fedppd_ray.models.own import try_network
from fedppd_ray.runs.export import read_student
from fedppd_ray.runtime.driver import train
from fedppd_ray.seeding import generator_for

NETS = """
import torch
import torch.nn.functional as F
from torch import nn


class ScanNet(nn.Module):
    def __init__(self, shape, classes, width=4):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], width, 5, stride=4)
        self.norm = nn.GroupNorm(2, width)
        self.token = nn.Parameter(torch.randn(width))
        self.drop = nn.Dropout(0.3)
        self.out = nn.LazyLinear(classes) if width == 0 else nn.Linear(width * 36, classes)

    def forward(self, x):
        return self.out(self.drop(F.relu(self.norm(self.conv(x)) + self.token[:, None, None]).flatten(1)))


class Wide(ScanNet):
    def __init__(self, shape, classes):
        super().__init__(shape, classes + 1)


class Doubled(ScanNet):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.double()


class Frozen(ScanNet):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.conv.weight.requires_grad_(False)


class Functional(ScanNet):
    def forward(self, x):
        return F.dropout(super().forward(x), training=self.training)


class Alpha(ScanNet):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.drop = nn.AlphaDropout()


class Empty(ScanNet):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.token = nn.Parameter(torch.full((4,), float("nan")))


def listed(shape, classes):
    return [shape, classes]
"""

CONFIG: dict[str, Any] = {
    "name": "own",
    "seed": 1,
    "method": "fedavg",
    "data": {"calibration": 20, "partition": {"kind": "iid", "rows_per_client": 24}},
    "federation": {"clients": 2, "rounds": 2},
    "client": {"epochs": 1, "batch_size": 12},
    "teacher": {"network": "scan_nets:ScanNet", "network_args": {"width": 6}},
}


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A configuration with its network beside it, of which no other test knows."""
    (tmp_path / "scan_nets.py").write_text(NETS)

    def write(**teacher: Any) -> Path:
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({**CONFIG, **({"teacher": teacher} if teacher else {})}))
        return path

    yield write
    forget(tmp_path)


def forget(folder: Path) -> None:
    """As in a process that has never heard of it."""
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
    sys.modules.pop("scan_nets", None)
    importlib.invalidate_caches()
    for name in [name for name in own_networks._sources if name.startswith("scan_nets:")]:
        own_networks._sources.pop(name)
        own_networks._places.pop(name, None)
        NETWORKS._items.pop(name)
        NETWORKS._modules.pop(name)


def test_a_network_beside_the_configuration_is_imported_with_its_digest_and_arguments(
    beside: Callable[..., Path],
) -> None:
    config = load_config(beside())
    section = config.values()["teacher"]
    assert section["network_args"] == {"width": 6}
    assert len(section["network_source"]) == 64
    check_networks(config)


def test_two_processes_started_for_it_find_it_and_refuse_another_source(beside: Callable[..., Path]) -> None:
    content = pickle.dumps(load_config(beside()))
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).teacher.network)"
    done = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, check=True)
    assert done.stdout.strip() == b"scan_nets:ScanNet"
    (beside().parent / "scan_nets.py").write_text(NETS + "\n# changed\n")
    done = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True)
    assert b"is not the one that was used" in done.stderr


def test_a_run_of_it_repeats_its_bits_resumes_and_opens_only_where_allowed(
    beside: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = beside()
    config = load_config(path)
    train(config, tmp_path / "whole", Observer(), serial=True)
    shorter = load_config(path, {"federation.rounds": 1})
    train(shorter, tmp_path / "resumed", Observer(), serial=True)
    train(config, tmp_path / "resumed", Observer(), serial=True, resume=True)
    vectors = [read_student(tmp_path / name)[1].export() for name in ("whole", "resumed")]
    assert np.array_equal(*vectors)
    card = json.loads((tmp_path / "whole/student/model.json").read_text())
    assert (card["network"], card["network_args"]) == ("scan_nets:ScanNet", {"width": 6})

    forget(tmp_path)
    with pytest.raises(ConfigError, match="FEDPPD_ALLOW_NETWORKS=scan_nets:ScanNet"):
        read_student(tmp_path / "whole")
    assert "scan_nets" not in sys.modules
    with pytest.raises(ConfigError, match=r"teacher.network: .*FEDPPD_ALLOW_NETWORKS=scan_nets:ScanNet"):
        parse_config(yaml.safe_load((tmp_path / "whole/config.yaml").read_text()))
    monkeypatch.setenv("FEDPPD_ALLOW_NETWORKS", "other:Net, scan_nets:ScanNet")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert np.array_equal(read_student(tmp_path / "whole")[1].export(), vectors[0])

    forget(tmp_path)
    (tmp_path / "scan_nets.py").write_text(NETS + "\n# changed, and this line is longer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="is not the one that was used"):
        read_student(tmp_path / "whole")
    monkeypatch.setenv("FEDPPD_ALLOW_NETWORKS", "scan_nets:ScanNet@any")
    read_student(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wide", r"with \(2, 11\); it must be \(2, 10\)"),
        ("Doubled", "float64, not float32; make it so with .float"),
        ("Frozen", "conv.weight is frozen.*register_buffer"),
        ("Functional", "draws from global random state.*models.networks.Dropout"),
        ("Alpha", r"AlphaDropout \(drop\).*models.networks.Dropout"),
        ("Empty", "token starts as inf or NaN"),
        ("listed", "made a list, not a torch.nn.Module"),
    ],
)
def test_what_would_fail_in_a_round_is_refused_before_it(
    beside: Callable[..., Path], name: str, message: str, tmp_path: Path
) -> None:
    config = load_config(beside(network=f"scan_nets:{name}"))
    with pytest.raises(ConfigError, match=message):
        train(config, tmp_path / "run", Observer(), serial=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"network": "scan_nets:Missing"}, "scan_nets has no Missing; it has .*ScanNet"),
        ({"network": "no_such_package.nets:Net"}, "no_such_package.nets cannot be imported"),
        ({"network": "scan_nets:"}, "not of the form"),
        ({"network": "scan_nets:ScanNet", "network_args": {"wide": 3}}, "teacher.network_args: .*it takes width"),
        ({"network": "auto", "network_args": {"width": 3}}, "teacher.network_args: mnist_teacher.*it takes none"),
        ({"network": "small_cnn", "network_args": {"width": 30}}, "width 30 is not a multiple of 4"),
    ],
)
def test_a_name_or_argument_that_is_wrong_is_named(
    beside: Callable[..., Path], teacher: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_networks(load_config(beside(**teacher)))


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3 * 8 * 8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(x.view(len(x), -1))
        return scores


def test_a_view_of_images_whose_channels_lie_last_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"use flatten\(1\) or reshape"):
        try_network("network x", Viewing, (3, 8, 8), 2)


def test_dropout_is_replaced_by_a_seeded_layer_and_draws_from_the_given_generator_alone(
    beside: Callable[..., Path],
) -> None:
    load_config(beside())
    module = build_network("scan_nets:ScanNet", (1, 28, 28), 10)
    assert isinstance(module.drop, Dropout)
    assert module.drop.p == 0.3
    initialise(module, generator_for(0, "init"))
    seed_dropout(module.train(), generator_for(0, "drop"))
    inputs = torch.ones(2, 1, 28, 28)
    first = module(inputs)
    seed_dropout(module, generator_for(0, "drop"))
    assert torch.equal(first, module(inputs))


def every_layer() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv1d(2, 3, 2), nn.Conv3d(1, 2, 2), nn.ConvTranspose2d(2, 2, 2), nn.LayerNorm(4)]
    layers += [nn.GroupNorm(2, 4), nn.BatchNorm1d(3), nn.InstanceNorm2d(2, affine=True), nn.Embedding(5, 3, 0)]
    layers += [nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, kdim=3, add_bias_kv=True), nn.LSTM(3, 2)]
    return nn.ModuleList([*layers, nn.PReLU(), nn.Bilinear(2, 2, 3), nn.RMSNorm(4)])


def test_every_layer_with_parameters_is_initialised_from_the_generator() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        module = every_layer()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
        initialise(module, generator_for(seed, "init"))
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    state = torch.get_rng_state()
    first, again, other = weights(0), weights(0), weights(1)
    torch.set_rng_state(state)
    assert all(torch.isfinite(value).all() for value in first.values())
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    assert {"0.weight", "1.weight", "2.weight", "7.weight", "8.in_proj_weight", "9.q_proj_weight", "9.bias_k"} <= drawn
    assert {"10.weight_ih_l0", "12.weight"} <= drawn
    assert torch.equal(first["7.weight"][0], torch.zeros(3))


def test_weights_that_only_a_constructor_sets_follow_the_seed_and_come_back(beside: Callable[..., Path]) -> None:
    load_config(beside())

    def token(seed: int) -> torch.Tensor:
        torch.rand(3)  # global random state is in another place each time
        module = build_network("scan_nets:ScanNet", (1, 28, 28), 10, seed=seed)
        with torch.no_grad():
            module.token.fill_(7)  # trained since
        initialise(module, generator_for(0, "init"))
        return module.token.detach().clone()

    assert torch.equal(token(1), token(1))
    assert not torch.equal(token(1), token(2))


@pytest.mark.parametrize("shape", [(1, 5, 3), (2, 64, 64), (4, 33, 17), (3, 224, 224)])
def test_auto_finds_networks_for_any_image_and_the_student_is_the_larger(shape: tuple[int, ...]) -> None:
    facts = {"classes": ["a", "b"], "shape": shape, "mean": [0.5] * shape[0], "std": [0.2] * shape[0]}
    config = parse_config({"data": {"name": "folder", "folder": facts, "partition": {"kind": "iid"}}})
    sizes = {}
    for role in ("teacher", "student"):
        module = build_network(config.dataset.network(role), shape, 2)
        initialise(module, generator_for(0, "init"))
        assert module(torch.zeros(2, *shape)).shape == (2, 2)
        sizes[role] = sum(parameter.numel() for parameter in module.parameters())
    assert sizes["student"] > 1.5 * sizes["teacher"]


@pytest.mark.parametrize("args", [{"norm": "group"}, {"width": 8, "depth": 1}, {"dropout": 0.5}])
def test_a_small_network_takes_its_settings(args: dict[str, Any]) -> None:
    config = parse_config({"method": "fedavg", "teacher": {"network": "small_cnn", "network_args": args}})
    check_networks(config)


def test_a_perceptron_takes_rows_of_any_shape() -> None:
    for shape in ((7,), (1, 28, 28)):
        module = build_network("mlp", shape, 3, {"hidden": [5], "dropout": 0.1})
        assert module.eval()(torch.zeros(4, *shape)).shape == (4, 3)
