"""Every key is described, in the terminal and in docs/config.md, and both are the code's own word."""

import json
from pathlib import Path

import pytest
from command import Command, refused

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.identity import flatten
from fedppd_ray.config.reference import Key, all_keys, as_markdown, built_in_methods

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def keys() -> dict[str, Key]:
    return {key.name: key for key in all_keys(built_in_methods())}


def test_every_key_has_a_description(keys: dict[str, Key]) -> None:
    assert [name for name, key in keys.items() if not key.description] == []


def test_every_key_of_a_run_is_listed(keys: dict[str, Key]) -> None:
    """But for what is inside of a value, such as network_args."""
    for method in built_in_methods():
        values = {"method": method} | ({"data": {"server_pool": 9}} if method == "fedbe" else {})
        assert set(flatten(parse_config(values))) - set(keys) <= {"active", "clients", "data.folder", "data.table"}
        listed = {key.name for key in all_keys([method])}
        assert set(flatten(parse_config(values))) - {"active", "clients", "data.folder", "data.table"} <= listed


@pytest.mark.parametrize(
    ("name", "values", "default"),
    [
        ("federation.quorum", "number > 0 and ≤ 1", "0.5"),
        ("federation.clients", "whole number ≥ 1", "10"),
        ("federation.deadline_s", "number > 0 or null", "null"),
        ("client.augment", "none or crop_flip", "none"),
        ("resources.client_cpus", "auto or number ≥ 0", "auto"),
        ("evaluation.corruptions", "true or false", "false"),
        ("client.transforms", "list of text", "[]"),
        ("clients.<id>.gpus", "number ≥ 0 or null", "null"),
        ("data.table.columns[].name", "text", "required, or read off the data"),
    ],
)
def test_range_and_default_are_told_in_words(keys: dict[str, Key], name: str, values: str, default: str) -> None:
    assert (keys[name].values, keys[name].default) == (values, default)


def test_a_key_says_which_methods_read_it(keys: dict[str, Key]) -> None:
    assert keys["teacher.temperature"].methods == ("fedppd",)
    assert set(keys["seed"].methods) == set(built_in_methods())


def test_the_document_is_what_the_command_prints() -> None:
    text = as_markdown(all_keys(built_in_methods()), built_in_methods())
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == text, "make docs/config.md anew: `make docs`"


def test_the_command_prints_a_key_a_section_or_all(fedppd: Command) -> None:
    out = fedppd("config", "federation.quorum").out
    assert out.splitlines() == [
        "federation.quorum: 0.5",
        "    share of a round's clients that must deliver",
        "    number > 0 and ≤ 1",
    ]
    assert {line["name"] for line in json.loads(fedppd("config", "checkpoint", "--json").out)} == {"checkpoint.keep"}
    assert "teacher.temperature" in fedppd("config").out
    assert "teacher.temperature" not in fedppd("config", "--method", "fedavg").out
    refused(fedppd("config", "federation.quorom"), "unknown key", "did you mean 'federation.quorum'?")
    refused(fedppd("config", "--method", "fedpd"), "--method fedpd", "did you mean")
