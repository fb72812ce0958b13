"""A site is asked about rows that it keeps back: only if it says that it may be, and for sums only."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.evaluation.questions import Figures
from fedppd_ray.sites import wire
from fedppd_ray.sites.mailbox import SiteFailedError
from tests.sites.door import STATE, Door, dumped


class Asked:
    """A mailbox whose round's side waits for an answer."""

    def __init__(self, door: Door) -> None:
        self.door, self.found = door, list[Any]()
        door.boxes["a"].cancel(99)  # the update that the door waits for
        door.boxes["a"].hear(wire.Ask(answers=True))
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()
        while (offer := door.boxes["a"].offer(0.0)) is None or offer.question is None:
            time.sleep(0.001)
        self.task = offer.task.model_dump()

    def _wait(self) -> None:
        try:
            self.found.append(self.door.boxes["a"].ask_about(STATE, Figures()))
        except Exception as error:
            self.found.append(error)

    def result(self) -> Any:
        self._thread.join(5)
        return self.found[0]


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    door = Door(tmp_path)
    yield Asked(door)
    door.close()


def test_a_question_goes_out_as_data_and_its_answer_comes_in(asked: Asked) -> None:
    status, answer = asked.door.send("POST", "/ask", dumped(answers=True))
    offer = wire.Answer.model_validate(answer).offer
    assert status == 200
    assert offer is not None
    assert offer.question == {"kind": "figures"}
    told = wire.Told.of(offer.task, {"rows": np.float64(12), "table": np.arange(6.0).reshape(2, 3)})  # type: ignore[dict-item]
    assert asked.door.send("POST", "/answers", told.model_dump_json().encode()) == (200, {"wanted": True})
    found = asked.result()
    assert float(found["rows"]) == 12
    assert found["table"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_site_that_does_not_say_that_it_may_be_asked_is_not_asked(tmp_path: Path) -> None:
    door = Door(tmp_path)
    assert door.boxes["b"].ask_about(STATE, Figures()) is None  # at once: its update is still waited for
    assert door.boxes["b"].offer(0.0).question is None  # type: ignore[union-attr]
    door.close()


@pytest.mark.parametrize(
    "answer",
    [{"x": [[30000], [0.0] * 30000]}, {"x": [[2], [1.0]]}, {"x": [[1], ["nan"]]}, {"x": [[-1], [1]]}],
)  # fmt: skip
def test_what_is_no_small_answer_is_refused(asked: Asked, answer: dict[str, Any]) -> None:
    assert asked.door.send("POST", "/answers", dumped(task=asked.task, answer=answer))[0] == 422
    assert asked.found == []


def test_an_update_is_no_answer_and_an_answer_no_update(asked: Asked) -> None:
    body = wire.encode(STATE.models)
    assert asked.door.boxes["a"].deliver(wire.Commit(task=asked.task, digest=body.blob.digest, rows=3), {}) is False
    task = asked.door.boxes["b"].offer(0.0).task.model_dump()  # type: ignore[union-attr]
    told = dumped(task=task, answer=None)
    assert asked.door.send("POST", "/answers", told, "b") == (200, {"wanted": False})
    assert asked.door.send("POST", "/answers", dumped(task=asked.task, answer=None)) == (200, {"wanted": True})
    assert asked.result() is None


def test_a_site_that_cannot_answer_says_why(asked: Asked) -> None:
    asked.door.send("POST", "/fail", dumped(task=asked.task, reason="unknown question 'figures'"))
    assert isinstance(asked.result(), SiteFailedError)
