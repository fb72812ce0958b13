"""Gates: what they let through, what they refuse, and how a mistake in the file is told."""

import pytest

from fedppd_ray.errors import ConfigError
from fedppd_ray.releases.gates import FIGURES, Gates, OfflineGates, parse_gates

GOOD = {"accuracy": 95.0, "nll": 0.2, "ece": 1.5, "latency_ms": 1.0, "ood_auroc": 0.93}


def outcomes(text: str, figures: dict[str, float | None], current: dict[str, float | None] | None) -> list[bool]:
    gates = parse_gates(f"offline: {{{text}}}".encode(), "gates.yaml")
    return [check.passed for check in gates.checked(figures, current)]


def test_every_figure_has_a_gate() -> None:
    assert list(FIGURES) == list(OfflineGates.model_fields)


@pytest.mark.parametrize(
    ("text", "value", "passed"),
    [
        ("accuracy: {at_least: 95}", 95.0, True),
        ("accuracy: {at_least: 95}", 94.99, False),
        ("ece: {at_most: 2}", 2.0, True),
        ("ece: {at_most: 2}", 2.01, False),
        ("coverage: {at_least: 90, at_most: 97}", 98.0, False),
    ],
)
def test_an_absolute_bound_includes_its_limit(text: str, value: float, passed: bool) -> None:
    assert all(outcomes(text, {text.split(":")[0]: value}, None)) is passed


@pytest.mark.parametrize(
    ("text", "value", "current", "passed"),
    [
        ("accuracy: {worse_by: 1}", 94.0, 95.0, True),
        ("accuracy: {worse_by: 1}", 93.9, 95.0, False),
        ("accuracy: {worse_by: 1}", 99.0, 95.0, True),  # better is no offence
        ("nll: {worse_by_percent: 10}", 0.22, 0.2, True),
        ("nll: {worse_by_percent: 10}", 0.23, 0.2, False),
        ("nll: {worse_by_percent: 0}", 0.1, 0.2, True),
        ("ood_auroc: {worse_by: 0.01}", 0.90, 0.93, False),
        ("latency_ms: {worse_by_percent: 50}", 1.6, 1.0, False),
    ],
)
def test_a_bound_against_current_knows_which_way_is_worse(
    text: str, value: float, current: float, passed: bool
) -> None:
    name = text.split(":")[0]
    assert outcomes(text, {name: value}, {name: current}) == [passed]


def test_the_first_version_has_nothing_to_be_worse_than() -> None:
    assert outcomes("accuracy: {worse_by: 1, at_least: 90}", GOOD, None) == [True, True]


def test_a_gate_that_cannot_look_stays_shut() -> None:
    """No out-of-distribution set: its AUROC is not known, and not met."""
    assert outcomes("ood_auroc: {at_least: 0.1, worse_by: 1}", {"ood_auroc": None}, None) == [False, False]
    assert outcomes("accuracy: {worse_by: 50}", GOOD, {}) == [False]


def test_without_gates_of_ones_own_a_badly_calibrated_version_is_refused() -> None:
    assert all(check.passed for check in Gates().checked(GOOD, GOOD))
    refused = [check.figure for check in Gates().checked(GOOD | {"ece": 12.0}, GOOD) if not check.passed]
    assert refused == ["ece"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"offline: {acuracy: {at_least: 9}}", ["offline.acuracy", "did you mean 'accuracy'"]),
        (b"offline: {accuracy: {atleast: 9}}", ["offline.accuracy.atleast", "did you mean 'at_least'"]),
        (b"ofline: {}", ["ofline", "did you mean 'offline'"]),
        (b"live: {request: 3}", ["live.request", "did you mean 'requests'"]),
        (b"offline: {accuracy: {}}", ["offline.accuracy", "bounds nothing"]),
        (b"offline: {accuracy: {at_least: null}}", ["offline.accuracy", "bounds nothing"]),
        (b"offline: {accuracy: {worse_by: -1}}", ["offline.accuracy.worse_by"]),
        (b"offline: {accuracy: {at_least: .nan}}", ["offline.accuracy.at_least"]),
        (b"offline: {accuracy: {at_least: yes}}", ["offline.accuracy.at_least"]),
        (b"live: {requests: 0}", ["live.requests"]),
        (b"- 3", ["write offline: and live:"]),
        (b"a: {", ["is not YAML"]),
        (b"\xff", ["is not YAML"]),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_the_key(content: bytes, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_gates(content, "gates.yaml")
    assert "\n" not in str(raised.value)
    for part in ("gates.yaml", *parts):
        assert part in str(raised.value)
