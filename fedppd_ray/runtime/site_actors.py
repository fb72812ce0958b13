"""A site in the coordinator's Ray cluster: an actor of no CPU that holds its mailbox, and answers as a client does.

The round loop, retries, deadline, quorum, gauges and reports see a client like any other; the gateway, in the driver's
process, reaches the mailbox through a `RayBox`.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from fedppd_ray.config.schema import Config
from fedppd_ray.federation.types import ClientInfo, GlobalState, Models, Receipt
from fedppd_ray.inference.questions import Answer, Question
from fedppd_ray.sites.mailbox import BoxAway, Mailbox
from fedppd_ray.sites.wire import Ask, Commit, Offer, Task
from fedppd_ray.sites.work import told_config

_QUESTIONS = 8  # calls of the gateway to one mailbox at once; one of them may wait for work


class RaySite:
    def __init__(self, config: Config, client: str, run: str) -> None:
        site = config.sites()[client]
        self._box = Mailbox(site, client, run, told_config(config), config.resources.start_timeout_s)

    # ---- as a client

    def train(self, _clients: Sequence[str], state: GlobalState) -> tuple[list[Receipt], list[Models]]:
        began = time.perf_counter()
        update = self._box.ask(state)
        metrics = {**update.receipt.metrics, "seconds": time.perf_counter() - began}
        receipt = update.receipt
        return [Receipt(receipt.client, receipt.round, receipt.rows, metrics)], [update.models]

    def answers(self, question: Question, state: GlobalState, _clients: Sequence[str]) -> dict[str, Answer]:
        found = self._box.ask_about(state, question)
        return {} if found is None else {self._box.client: found}

    def describe(self, _clients: Sequence[str]) -> list[ClientInfo]:
        return [self._box.info() or ClientInfo(self._box.client, 0, ())]

    @ray.method(concurrency_group="control")
    def cancel(self, round_id: int) -> None:
        self._box.cancel(round_id)

    @ray.method(concurrency_group="control")
    def ready(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="control")
    def process(self) -> int:
        return os.getpid()

    # ---- as a mailbox

    @ray.method(concurrency_group="gateway")
    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._box, name)(*arguments)


SiteActor = ray.remote(
    num_cpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups={"control": 1, "gateway": _QUESTIONS}
)(RaySite)


class RayBox:
    """`sites.mailbox.Box` by way of an actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return ray.get(self._handle.call.remote(name, *arguments))
        except RayTaskError:
            raise
        except RayError as error:
            raise BoxAway(f"the site's mailbox is being replaced ({type(error).__name__})") from None

    def hear(self, presence: Ask) -> None:
        self._call("hear", presence)

    def put_out(self) -> None:
        self._call("put_out")

    def offer(self, wait_s: float) -> Offer | None:
        return self._call("offer", wait_s)

    def wanted(self, task: Task) -> bool:
        return self._call("wanted", task)

    def body(self, digest: str) -> bytes | None:
        return self._call("body", digest)

    def accepted(self, commit: Commit) -> bool:
        return self._call("accepted", commit)

    def deliver(self, commit: Commit, models: Mapping[str, Any]) -> bool:
        return self._call("deliver", commit, models)

    def tell(self, task: Task, numbers: Answer | None) -> bool:
        return self._call("tell", task, numbers)

    def fail(self, task: Task, reason: str, refused: bool) -> bool:
        return self._call("fail", task, reason, refused)
