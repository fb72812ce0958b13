"""Configuration: what is wrong is refused in one line that names the key and the remedy."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedppd_ray.config.file import load_config, parse_config
from fedppd_ray.config.identity import binding, config_hash, difference
from fedppd_ray.config.schema import client_ids, for_rows
from fedppd_ray.errors import ConfigError

ROOT = Path(__file__).parents[2]


def refusal(values: dict[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("values", "key", "remedy"),
    [
        ({"sede": 1}, "sede", "did you mean 'seed'?"),
        ({"Seed": 1}, "Seed", "did you mean 'seed'?"),
        ({"federation": {"round": 3}}, "federation.round", "did you mean 'rounds'?"),
        ({"federation": {"Rounds": 3}}, "federation.Rounds", "did you mean 'rounds'?"),
        ({"server": {"distill": {"sample": 3}}}, "server.distill.sample", "did you mean 'samples'?"),
        ({"clients": {"client-00": {"gpu": 1}}}, "clients.client-00.gpu", "did you mean 'gpus'?"),
        ({"float": 1}, "float", "choose one of"),
        ({"": 1}, "", "choose one of"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(values: dict[str, Any], key: str, remedy: str) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: unknown key")
    assert remedy in message


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"federation": {"rounds": "four"}}, "federation.rounds"),
        ({"federation": {"rounds": 2.5}}, "federation.rounds"),
        ({"federation": {"rounds": True}}, "federation.rounds"),
        ({"seed": True}, "seed"),
        ({"name": 2024}, "name"),
        ({"name": ""}, "name"),
        ({"federation": None}, "federation"),
        ({"federation": [1]}, "federation"),
        ({"data": "mnist"}, "data"),
        ({"method": "fedavg?"}, "method"),
        ({"server": {"distill": {"divide_by_classes": "perhaps"}}}, "server.distill.divide_by_classes"),
        ({"resources": {"client_cpus": "many"}}, "resources.client_cpus"),
        ({1: 2}, "1"),
    ],
)
def test_a_wrong_type_is_refused_by_its_key(values: dict[Any, Any], key: str) -> None:
    assert refusal(values).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"federation": {"clients": 0}}, "federation.clients"),
        ({"federation": {"rounds": 0}}, "federation.rounds"),
        ({"federation": {"participation": 0}}, "federation.participation"),
        ({"federation": {"participation": 1.01}}, "federation.participation"),
        ({"federation": {"quorum": 1.5}}, "federation.quorum"),
        ({"client": {"epochs": 0}}, "client.epochs"),
        ({"client": {"batch_size": 0}}, "client.batch_size"),
        ({"teacher": {"rate": 0}}, "teacher.rate"),
        ({"teacher": {"rate": float("nan")}}, "teacher.rate"),
        ({"teacher": {"temperature": float("inf")}}, "teacher.temperature"),
        ({"data": {"partition": {"alpha": 0}}}, "data.partition.alpha"),
        ({"data": {"partition": {"major": 11}}}, "data.partition.major"),
        ({"data": {"server_pool": -1}}, "data.server_pool"),
        ({"server": {"aggregate": "distill"}}, "data.server_pool"),
        ({"server": {"aggregate": "mean"}}, "server.aggregate"),
        ({"evaluation": {"every": 0}}, "evaluation.every"),
        ({"evaluation": {"coverage": 0}}, "evaluation.coverage"),
        ({"resources": {"client_cpus": -1}}, "resources.client_cpus"),
        ({"clients": {"client-10": {"cpus": 1}}}, "clients.client-10"),
        ({"clients": {"client-0*": {"cpus": -1}}}, "clients.client-0*.cpus"),
        ({"resources": {"actors": 0}}, "resources.actors"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep"),
    ],
)
def test_an_impossible_value_is_refused_by_its_key(values: dict[str, Any], key: str) -> None:
    assert refusal(values).startswith(f"{key}: ")


def test_too_many_major_classes_says_how_many_there_are() -> None:
    assert "choose at most 10" in refusal({"data": {"partition": {"major": 11}}})


def test_as_many_major_classes_as_classes_are_allowed() -> None:
    assert parse_config({"data": {"partition": {"major": 10}}}).data.partition.major == 10


def test_both_ways_to_mend_a_union_are_named() -> None:
    message = refusal({"resources": {"client_cpus": -1}})
    assert "'auto'" in message
    assert "greater than or equal to 0" in message


def test_several_errors_are_counted_by_key() -> None:
    message = refusal({"seed": -1, "name": 3, "resources": {"client_cpus": "x"}})
    assert message.endswith("(and 2 more)")


@pytest.mark.parametrize(
    ("values", "start"),
    [
        ({"data": {"name": "mnist5"}}, "data.name: unknown data set 'mnist5'; did you mean 'mnist"),
        ({"data": {"name": "glyphs"}}, "data.name: glyphs is an out-of-distribution set"),
        ({"evaluation": {"ood": "lettres"}}, "evaluation.ood: unknown data set 'lettres'"),
        ({"evaluation": {"ood": ["kmnist", "kmnist"]}}, "evaluation.ood: a set comes twice"),
        ({"teacher": {"network": "lenet"}}, "teacher.network: unknown network 'lenet'"),
        ({"student": {"network": "cifar10_student"}}, "student.network: cifar10_student takes images (3, 32, 32)"),
        ({"student": {"network": "resnet18"}}, "student.network: resnet18 takes 3 channels, mnist5k has 1"),
    ],
)
def test_an_unknown_or_unfit_data_set_or_network_is_refused(values: dict[str, Any], start: str) -> None:
    assert refusal(values).startswith(start)


def test_resnets_are_accepted_for_colour_images() -> None:
    config = parse_config({"data": {"name": "cifar10"}, "student": {"network": "resnet34"}})
    assert config.network_for("student") == "resnet34"
    assert config.network_for("teacher") == "cifar10_teacher"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("federation: {rounds: 4", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        ("- 1\n- 2\n", "must hold `key: value` lines, not a list"),
        ("just text", "must hold `key: value` lines, not a str"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_in_one_line(tmp_path: Path, text: str, part: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: {part}")
    assert "\n" not in str(caught.value)


def test_a_file_of_other_bytes_than_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config(path)


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_missing_file_or_a_folder_is_refused_by_its_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*give the path of a YAML file"):
        load_config(tmp_path / name)


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "")) == parse_config({})


def test_overrides_reach_nested_keys_and_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "federation: {rounds: 9, clients: 4}\n")
    config = load_config(path, ["federation.rounds=2", "client.epochs=7", "teacher.rate=1e-3", "evaluation.ood=null"])
    assert (config.federation.rounds, config.federation.clients, config.client.epochs) == (2, 4, 7)
    assert (config.teacher.rate, config.evaluation.ood) == (0.001, None)


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("federation.rounds", "--set federation.rounds: write key=value"),
        ("=4", "--set =4: write key=value"),
        ("federation.rounds={", "--set federation.rounds: '{' is not a valid value"),
        ("seed.deep=1", "--set seed.deep: seed is a value, not a section"),
        ("federation.rounds=", "federation.rounds: "),
        ("federation.rouns=4", "federation.rouns: unknown key; did you mean 'rounds'?"),
        ("Federation.rounds=4", "Federation: unknown key"),
    ],
)
def test_a_bad_override_is_refused_in_one_line(tmp_path: Path, override: str, start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "seed: 1"), [override])
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4/N", 0.04),
        ("4 / N", 0.04),
        ("1e-4*N", 0.01),
        ("2.5*n", 250.0),
        (".5/N", 0.005),
        ("1e-3", 0.001),
        ("0.25", 0.25),
    ],
)
def test_a_setting_may_scale_with_the_rows(tmp_path: Path, text: str, value: float) -> None:
    config = load_config(written(tmp_path, f"teacher: {{temperature: {text}, prior_precision: {text}}}"))
    assert for_rows(config.teacher.temperature, 100) == pytest.approx(value, rel=1e-12)
    assert for_rows(config.teacher.prior_precision, 100) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["N", "N/4", "4/M", "-4/N", "1.2.3/N", "./N", "warm", "4/N/N", "", -1, [1]])
def test_a_malformed_scaled_setting_is_refused(text: object) -> None:
    assert refusal({"teacher": {"temperature": text}}).startswith("teacher.temperature: ")


def test_the_hash_ignores_what_a_resumed_run_may_change() -> None:
    changed = parse_config(
        {
            "name": "other",
            "federation": {"rounds": 99, "quorum": 0.9, "deadline_s": 60, "retries": 7},
            "resources": {"client_cpus": 0.5},
            "checkpoint": {"keep": 7},
            "evaluation": {"every": 3, "ood": None},
            "data": {"root": "/elsewhere"},
        }
    )
    assert config_hash(changed) == config_hash(parse_config({}))


@pytest.mark.parametrize(
    "values",
    [
        {"seed": 1},
        {"data": {"name": "mnist"}},
        {"data": {"calibration": 10}},
        {"federation": {"clients": 9}},
        {"federation": {"participation": 0.5}},
        {"client": {"batch_size": 41}},
        {"teacher": {"temperature": 0}},
        {"student": {"distill_every": "iteration"}},
        {"server": {"aggregate": "distill"}, "data": {"server_pool": 9}},
        {"method": "fedavg"},
    ],
)
def test_the_hash_sees_whatever_changes_a_round(values: dict[str, Any]) -> None:
    assert config_hash(parse_config(values)) != config_hash(parse_config({}))


def test_the_difference_names_each_changed_key_and_both_values() -> None:
    before, after = parse_config({}), parse_config({"seed": 4, "client": {"epochs": 1}})
    assert difference(binding(before), binding(after)) == ["seed: 0 -> 4", "client.epochs: 5 -> 1"]


def test_the_difference_shows_keys_that_one_side_lacks() -> None:
    assert difference({"a": 1, "b": 2}, {"b": 2, "c": None}) == ["a: 1 -> absent", "c: absent -> None"]


def test_a_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = parse_config(
        {
            "name": "1e5",
            "teacher": {"temperature": 1e-5, "prior_precision": "1e-4*N"},
            "resources": {"client_gpus": 0.25},
            "clients": {"client-03": {"cpus": 0.5, "label_selector": {"site": "a"}}},
        }
    )
    path = written(tmp_path, yaml.safe_dump(config.values()))
    assert load_config(path) == config


def test_the_last_pattern_that_says_something_of_a_client_wins() -> None:
    config = parse_config(
        {"clients": {"client-0*": {"cpus": 1, "gpus": 0}, "client-03": {"cpus": 2}, "client-1*": {"cpus": 3}}}
        | {"federation": {"clients": 12}}
    )
    chosen = {name: config.overrides_for(name) for name in ("client-02", "client-03", "client-10")}
    assert {name: (own.cpus, own.gpus) for name, own in chosen.items()} == {
        "client-02": (1, 0),
        "client-03": (2, 0),
        "client-10": (3, None),
    }


def test_configuration_cannot_be_changed_after_it_was_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config({}).federation.rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize("count", [1, 10, 100, 101, 1001])
def test_client_ids_sort_by_number(count: int) -> None:
    ids = client_ids(count)
    assert len(set(ids)) == count
    assert sorted(ids) == ids
    assert len({len(name) for name in ids}) == 1


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    assert load_config(path).name
