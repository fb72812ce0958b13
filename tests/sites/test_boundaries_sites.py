"""Sites exactly at their limits: how fresh a request is, how long a site is waited for, what a policy just allows."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.nouns import TRANSFORMS
from fedppd_ray.data.datasets import load
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.runs.signature import Key, export_refusal
from fedppd_ray.sites import wire
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.identity import FRESH_S, Doorkeeper, Request, proof
from fedppd_ray.sites.mailbox import Mailbox, SiteLostError
from fedppd_ray.sites.policy import Policy
from fedppd_ray.sites.work import Rows, Work, told_config
from tests.sites.door import Clock

RUN = "ab" * 16
STATE = GlobalState(0, {"student": np.zeros(3, np.float32)})


# ---- the door


def test_a_request_is_fresh_for_exactly_its_time_in_both_directions_and_never_twice(key: Key) -> None:
    clock = Clock()
    door = Doorkeeper(key.public, lambda: {"a": key.public}, clock)
    clock.now += 500

    def ask(made: float, nonce: int) -> str | None:
        request = Request("POST", "/v1/ask", b"", "a", f"{made:.3f}", f"{nonce:032x}")
        return door.refusal(request, key.sign(request.text(key.public)))

    assert ask(clock.now - FRESH_S, 1) is None
    assert ask(clock.now + FRESH_S, 2) is None
    assert "clock" in str(ask(clock.now - FRESH_S - 0.01, 3))
    assert "clock" in str(ask(clock.now + FRESH_S + 0.01, 4))
    made = clock.now
    assert ask(made, 5) is None
    for _ in range(3):  # others come meanwhile, and old nonces are swept
        clock.now += FRESH_S / 3
        assert ask(clock.now, 6 + int(clock.now)) is None
        assert ask(made, 5) == "seen before"


def test_an_invitation_that_was_used_is_open_no_more(tmp_path: Path, key: Key) -> None:
    guests = Guests(tmp_path / "guests", Clock())
    code = guests.invite("hospital-a", 1.0)
    assert list(guests.invitations()) == ["hospital-a"]
    assert guests.join("hospital-a", key.public, proof(code, "hospital-a", key.public)) is None
    assert guests.invitations() == {}


def test_a_signature_for_another_purpose_vouches_for_no_export(key: Key) -> None:
    card = b'{"sha256": "abc"}'
    content = f'{{"public_key": "{key.public}", "signature": "{key.sign(card)}"}}'.encode()
    assert "was changed" in str(export_refusal(card, content, key.public))


# ---- a mailbox


def waiting(box: Mailbox) -> tuple[threading.Thread, list[Any]]:
    """Somebody who asks, and what came of it."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(box.ask(STATE))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while box.offer(0.0) is None:
        time.sleep(0.001)
    return thread, found


def test_a_site_that_works_is_alive_and_one_that_is_silent_for_the_whole_time_is_lost() -> None:
    clock = Clock()
    box = Mailbox("a", "client-00", RUN, {}, 5.0, clock)
    box.hear(wire.Ask())
    task = wire.Task(run=RUN, round=1, attempt=1)
    thread, found = waiting(box)
    for _ in range(3):
        clock.now += 4.9
        assert box.wanted(task)  # a beat
        assert box.info() is not None
    clock.now += 4.9
    assert box.body("0" * 64) is None  # so is a question for weights
    clock.now += 5.0
    assert box.info() is None
    thread.join(10)
    assert isinstance(found[0], SiteLostError)


def test_only_the_attempt_that_is_asked_for_is_answered() -> None:
    box = Mailbox("a", "client-00", RUN, {}, 600.0)
    box.hear(wire.Ask())
    update = {"student": np.ones(3, np.float32)}

    def commit(attempt: int) -> wire.Commit:
        return wire.Commit(task=wire.Task(run=RUN, round=1, attempt=attempt), digest="0" * 64, rows=30)

    thread, _ = waiting(box)
    assert box.deliver(commit(1), update)
    thread.join(10)
    assert box.accepted(commit(1))
    thread, found = waiting(box)  # the server was lost: the same round again
    assert not box.wanted(commit(1).task)
    assert not box.deliver(commit(1), update)
    assert box.accepted(commit(1))  # the old one was taken, and nobody asks for it
    assert not box.accepted(commit(2))  # the same bits, but they are asked for
    assert box.deliver(commit(2), update)
    thread.join(10)
    assert found[0].receipt.round == 1


# ---- a policy


def config_of(**sections: Any) -> Any:
    return parse_config({"federation": {"clients": 3, "rounds": 7}, "client": {"epochs": 4}, **sections})


def test_exactly_what_a_policy_allows_is_done() -> None:
    policy = Policy(most_epochs=4, most_rounds=7, fewest_rows=50, most_releases=7)
    assert policy.refusal(config_of(), 50, 6) is None
    for rows, releases, changes in (
        (49, 6, {}),
        (50, 7, {}),
        (50, 6, {"client": {"epochs": 5}}),
        (50, 6, {"federation": {"clients": 3, "rounds": 8}}),
    ):
        assert policy.refusal(config_of(**changes), rows, releases) is not None


def test_transforms_are_those_of_the_policy_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(TRANSFORMS) is not None  # loaded
    names = ("clip", "noise")
    monkeypatch.setattr(TRANSFORMS, "_items", {**TRANSFORMS._items, **dict.fromkeys(names, lambda update, *_: update)})
    monkeypatch.setattr(TRANSFORMS, "_modules", {**TRANSFORMS._modules, **dict.fromkeys(names, __name__)})
    policy = Policy(transforms=names)
    assert policy.refusal(config_of(client={"epochs": 4, "transforms": names}), 50, 0) is None
    for others in (names[::-1], names[:1], ()):
        why = policy.refusal(config_of(client={"epochs": 4, "transforms": others}), 50, 0)
        assert str(why).startswith("transforms: an update must pass clip, noise")


def test_published_weights_are_fetched_with_consent_only() -> None:
    config = parse_config(
        {
            "method": "fedavg",
            "data": {"name": "cifar10"},
            "evaluation": {"ood": None},
            "teacher": {"network": "resnet18", "pretrained": True},
        }
    )
    assert str(Policy().refusal(config, 50, 0)).startswith("pretrained")
    assert Policy(pretrained=True).refusal(config, 50, 0) is None


def test_metrics_and_row_counts_leave_as_the_policy_says(tmp_path: Path) -> None:
    rows = load("mnist5k").train
    np.save(tmp_path / "images.npy", np.asarray(rows.images[:14, 0]))
    np.save(tmp_path / "labels.npy", np.asarray(rows.labels[:14]))
    config = parse_config({"method": "fedavg", "federation": {"clients": 3}, "client": {"epochs": 1, "batch_size": 7}})
    task = wire.Task(run=RUN, round=1, attempt=1)
    blob = wire.Blob(digest="0" * 64, size=1)
    offer = wire.Offer(task=task, client="client-00", config=told_config(config), state=blob)
    work = Work(offer, Rows(tmp_path), "cpu")
    state = GlobalState(0, build_method(config).initial_models())
    silent = work.update("work", offer, state, Policy(rows="rounded"))
    assert (silent.rows, silent.metrics) == (10, {})
    open_ = work.update("work", offer, state, Policy(metrics=True))
    assert (open_.rows, list(open_.metrics)) == (14, ["training_loss"])
    assert replace(open_, rows=10, metrics={}) == silent
