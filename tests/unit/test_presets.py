"""Every configuration that the project ships can be loaded, and says what the paper's table says."""

from pathlib import Path
from typing import Any

import pytest

from fedppd_ray.config.file import load_config, load_for_method
from fedppd_ray.methods import compare_rows
from fedppd_ray.studies.comparison import require_same_data

FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))


def preset(name: str) -> Any:
    return load_config(FOLDER / f"{name}.yaml")


def row(name: str, label: str) -> Any:
    """A preset as this row of a comparison takes it."""
    return load_for_method(FOLDER / f"{name}.yaml", (), compare_rows()[label].changes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_loads_under_the_name_of_its_file(path: Path) -> None:
    assert load_config(path).name == path.stem


@pytest.mark.parametrize(
    ("name", "rounds", "teacher", "student", "server"),
    [
        ("mnist", 100, (0.045, 2, 0.85), 0.055, (20, 64, 0.001, 0.001, 10)),
        ("femnist", 200, (0.05, 3, 0.8), 0.085, (50, 128, 0.001, 0.001, 120)),
        ("cifar10", 200, (0.055, 3, 0.85), 0.02, (20, 128, 0.0015, 0.0025, 10)),
        ("cifar100", 200, (0.055, 3, 0.85), 0.02, (20, 128, 0.0015, 0.0025, 10)),
    ],
)
def test_rates_and_server_settings_are_the_authors(
    name: str, rounds: int, teacher: tuple[float, int, float], student: float, server: tuple[float, ...]
) -> None:
    for config in (row(name, "fedppd_distill"), row(f"{name}_iid", "fedppd_distill")):
        distill = config.server.distill
        assert (config.federation.clients, config.federation.rounds) == (10, rounds)
        assert (config.client.epochs, config.client.batch_size) == (10, 40)
        assert (config.teacher.rate, config.teacher.rate_step, config.teacher.rate_gamma) == teacher
        assert (config.teacher.temperature, config.teacher.send) == ("4/N", "last")
        assert config.teacher.prior_precision == "1e-4*N"
        assert (config.student.rate, config.student.weight_decay) == (student, 1e-4)
        assert (config.student.input_noise, config.student.distill_every) == (0.001, "epoch")
        found = (distill.epochs, distill.batch_size, distill.teacher_rate, distill.student_rate, distill.samples)
        assert found == server
        assert (distill.sharpen, distill.divide_by_classes) == (0.5, True)
        assert (distill.momentum, distill.weight_decay, distill.swa_start, distill.swa_every) == (0.9, 1e-4, 500, 25)
        assert config.client.augment == ("crop_flip" if name.startswith("cifar") else "none")


@pytest.mark.parametrize(
    ("name", "rows", "major", "extra"), [("mnist", 500, 2, 10), ("cifar10", 2100, 2, 10), ("cifar100", 2200, 20, 2)]
)
def test_clients_hold_as_much_as_the_authors(name: str, rows: int, major: int, extra: int) -> None:
    part = preset(name).data.partition
    assert (part.kind, part.rows_per_client, part.major, part.extra_per_class) == ("major_classes", rows, major, extra)
    assert row(name, "fedppd_distill").data.server_pool == row(name, "fedavg").data.reserved == 10_000


@pytest.mark.parametrize("name", ["mnist", "femnist", "cifar10", "cifar100"])
def test_the_iid_variants_are_4000_random_rows_a_client(name: str) -> None:
    iid = row(f"{name}_iid", "fedbe").data
    assert (iid.partition.kind, iid.partition.rows_per_client, iid.server_pool) == ("iid", 4000, 10_000)


def test_only_femnists_rates_decay_from_round_to_round() -> None:
    decaying = {path.stem: decay for path in FILES if (decay := load_config(path).client.rate_decay) != 1.0}
    assert decaying == {"femnist": 0.99, "femnist_iid": 0.99, "femnist_recommended": 0.99}


@pytest.mark.parametrize(("name", "ood"), [("femnist", "kmnist"), ("cifar10", "svhn"), ("cifar100", "svhn")])
def test_the_out_of_distribution_set_is_the_papers(name: str, ood: str) -> None:
    assert preset(name).evaluation.ood == ood


@pytest.mark.parametrize("name", ["mnist", "femnist", "cifar10", "cifar10_small", "cifar100"])
def test_our_settings_can_stand_beside_the_authors_on_the_same_rows(name: str) -> None:
    label = "fedppd_distill" if preset(f"{name}_recommended").server.aggregate == "distill" else "fedppd"
    theirs, ours = row(name, label), row(f"{name}_recommended", label)
    require_same_data(name, theirs, ours)
    assert (ours.federation, ours.evaluation) == (theirs.federation, theirs.evaluation)
    assert ours.student.rate >= theirs.student.rate


@pytest.mark.parametrize("name", ["femnist", "cifar10", "cifar10_small", "cifar100"])
def test_our_servers_distil_by_the_plain_loss(name: str) -> None:
    distill = row(f"{name}_recommended", "fedppd_distill").server.distill
    assert (distill.sharpen, distill.divide_by_classes) == (1.0, False)


def test_our_settings_for_mnist_are_the_ones_that_were_measured() -> None:
    theirs, ours = row("mnist", "fedppd_distill"), preset("mnist_recommended")
    assert (ours.server.aggregate, ours.server.distill) == ("distill", theirs.server.distill)
    assert (ours.client, ours.teacher, ours.student) == (theirs.client, theirs.teacher, theirs.student)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_baselines_rate_is_half_of_the_teachers_with_its_schedule(path: Path) -> None:
    """The drift of the chain without its noise."""
    baseline, teacher = row(path.stem, "fedavg").baseline, preset(path.stem).teacher
    assert baseline.rate == pytest.approx(teacher.rate / 2)
    assert (baseline.rate_step, baseline.rate_gamma) == (teacher.rate_step, teacher.rate_gamma)
