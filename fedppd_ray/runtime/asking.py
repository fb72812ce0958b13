"""Questions to the clients' actors, between two rounds: who does not answer in time is left out, and named."""

import logging
from typing import Any

import ray
from ray.exceptions import RayError

from fedppd_ray.federation.types import GlobalState
from fedppd_ray.inference.questions import Answer, Question
from fedppd_ray.runtime.hosts import Hosts, reason

log = logging.getLogger(__name__)


class Asking:
    def __init__(self, hosts: Hosts, limit_s: float) -> None:
        self._hosts, self._limit_s = hosts, limit_s
        self._last: tuple[GlobalState, Any] | None = None  # many questions are asked about one state

    def ask(self, question: Question, state: GlobalState) -> dict[str, Answer]:
        if self._last is None or self._last[0] is not state:
            self._last = (state, ray.put(state.broadcast()))
        asked = {
            host.handle.answers.remote(question, self._last[1], clients): host
            for host, clients in self._hosts.askable()
        }
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=self._limit_s) if asked else ([], [])
        for ref in late:
            log.warning("%s has not answered within %g s", asked[ref].name, self._limit_s)
        found: dict[str, Answer] = {}
        for ref in ready:
            try:
                found |= ray.get(ref)
            except RayError as error:
                log.warning("%s has not answered: %s", asked[ref].name, reason(error))
        return dict(sorted(found.items()))
