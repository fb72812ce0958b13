"""Plain log lines of a run."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fedppd_ray.cli.display import LiveDisplay, PlainDisplay, open_display
from fedppd_ray.config.schema import Config
from fedppd_ray.federation.failure_policy import Action
from fedppd_ray.federation.types import ClientInfo, Failure

CLIENTS = [ClientInfo("client-00", 30, (30,)), ClientInfo("client-01", 24, (24,))]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("fedppd"), "propagate", True)
    caplog.set_level(logging.INFO, "fedppd")
    return lambda: [record.getMessage() for record in caplog.records]


def record(round_id: int, seconds: float, accuracy: float | None = 91.234, failed: int = 0) -> dict[str, Any]:
    figures = {"accuracy": accuracy, "ece": 2.5, "nll": 0.345}
    return {"round": round_id, "seconds": seconds, "clients": 3, "failed": failed, **figures}


@pytest.fixture
def display(tiny: Callable[..., Config]) -> PlainDisplay:
    display = PlainDisplay()
    display.run_started(tiny(federation={"rounds": 4}), 1, CLIENTS)
    return display


def test_a_run_says_what_it_trains(lines: Callable[[], list[str]], tiny: Callable[..., Config]) -> None:
    PlainDisplay().run_started(tiny(federation={"rounds": 4}), 1, CLIENTS)
    assert lines() == ["tiny: fedppd on mnist5k, 2 clients with 24 to 30 rows, rounds 1 to 4"]


def test_a_round_says_its_figures_and_the_time_left(lines: Callable[[], list[str]], display: PlainDisplay) -> None:
    display.round_finished(record(1, 20.0))
    display.round_finished(record(2, 40.0, failed=1))
    assert lines() == [
        "round 1/4  3 clients  accuracy 91.23 %  ECE 2.50 %  NLL 0.345  20.0 s  1:00 left",
        "round 2/4  3 clients  1 failed  accuracy 91.23 %  ECE 2.50 %  NLL 0.345  40.0 s  1:00 left",
    ]


def test_the_last_round_has_no_time_left_and_an_unevaluated_one_no_figures(
    lines: Callable[[], list[str]], display: PlainDisplay
) -> None:
    display.round_finished(record(4, 20.0, accuracy=None))
    assert lines()[-1] == "round 4/4  3 clients  20.0 s"


def test_a_failure_names_the_client_the_reason_and_its_fate(
    lines: Callable[[], list[str]], display: PlainDisplay
) -> None:
    display.client_failed(Failure("client-01", "died"), Action.RETRY)
    display.client_failed(Failure("client-01", "died again"), Action.DROP)
    assert lines() == [
        "client-01 failed (died): trying again",
        "client-01 failed (died again): dropped for this round",
    ]


def test_outside_a_terminal_the_display_is_plain() -> None:
    assert type(open_display()) is PlainDisplay


def test_the_live_display_goes_through_a_run(tiny: Callable[..., Config], lines: Callable[[], list[str]]) -> None:
    from fedppd_ray.federation.types import Receipt

    live = LiveDisplay()
    try:
        live.run_started(tiny(), 2, [ClientInfo("client-00", 30, (30,))])
        live.round_started(2, ["client-00"])
        live.client_done(Receipt("client-00", 2, 30))
        live.round_finished(record(2, 1.0))
        rounds, clients = live._progress.tasks
        assert (rounds.completed, rounds.total) == (2, 3)
        assert (clients.completed, clients.total) == (1, 1)
        assert "accuracy 91.23 %" in rounds.fields["note"]
        assert live._progress.live.is_started
    finally:
        live.run_failed(KeyboardInterrupt())
    assert not live._progress.live.is_started
    assert lines()[-1].startswith("round 2/3")
