"""The loop at a site: ask for work, look whether the policy allows it, do it, send weights back, note what has left.

It dials out and listens to nobody. A killed agent starts where it was: an update that was made is kept until it is
delivered, an upload goes on where it stopped, and the same work gives the same bits.
"""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from fedppd_ray.errors import ConfigError, DataError, FedPPDError
from fedppd_ray.federation.types import ClientInfo, GlobalState
from fedppd_ray.inference.questions import question_of
from fedppd_ray.runs.files import write_atomically
from fedppd_ray.runs.layout import CARD, SIGNATURE, STUDENT, WEIGHTS
from fedppd_ray.runs.signature import export_refusal
from fedppd_ray.sites import identity, wire
from fedppd_ray.sites.home import Home, Joined, Spooled
from fedppd_ray.sites.line import AwayError, Line, RefusedError, StoppedError, hello
from fedppd_ray.sites.policy import Policy
from fedppd_ray.sites.tls import Tls
from fedppd_ray.sites.work import Rows, Work, identity_of_run, name_of_work, taken_config

log = logging.getLogger("fedppd")
_BEAT_S = 3.0
_UNWANTED = 3  # beats in a row, before work is given up: a coordinator that was restarted may want it yet
_NO_RUN_S = 5.0
_MOST_BYTES = 8 * 2**30  # of weights that a site takes in


def join(home: Home, name: str, url: str, code: str, tls: Tls) -> Joined:
    """Take up an invitation. The coordinator must be the one that gave it."""
    key, expected = home.key(), identity.host_of(code)
    found = hello(url, tls)
    if not found.coordinator.startswith(expected):
        raise ConfigError(
            f"{url}: who answers there is not who invited you: its key begins with {found.coordinator[:20]}, the code "
            f"is of {expected}; ask whom you have the code from"
        )
    line = Line(url, name, key, found.coordinator, tls)
    try:
        message = wire.Join(name=name, public_key=key.public, proof=identity.proof(code, name, key.public))
        line.tell_once("/join", message, wire.Nothing)
    except RefusedError as error:
        raise ConfigError(f"{url}: {error.reason}; ask for a new invitation") from None
    except AwayError as error:
        raise FedPPDError(f"{url}: {error}; try again") from None
    finally:
        line.close()
    files = tls.absolute()
    joined = Joined(name, url, found.coordinator, files.ca, files.certificate, files.key)
    home.join(joined)
    home.record("joined", url=url, coordinator=found.coordinator, name=name)
    return joined


class Agent:
    def __init__(
        self, home: Home, rows: Rows, stop: threading.Event, device: str = "cpu", student: Path | None = None
    ) -> None:
        """`student`: a folder that gets the finished student, for `fedppd serve`."""
        self._home, self._rows, self._stop, self._device, self._student = home, rows, stop, device, student
        self._joined = home.joined()
        home.policy()  # a mistake in it is found now
        self._line = Line(
            self._joined.url, self._joined.name, home.key(), self._joined.coordinator, self._joined.tls(), stop
        )
        self._work: tuple[str, Work] | None = None
        self._info: ClientInfo | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._quiet = False

    def run(self, once: bool) -> None:
        """Until it is stopped; with `once`, until a run is over."""
        torch.set_num_threads(1)  # the same arithmetic as a client's elsewhere: threads may change the last bit
        log.info("%s takes part at %s", self._joined.name, self._joined.url)
        try:
            while not self._stop.is_set():
                answer = self._ask()
                if answer is None:
                    continue
                if answer.offer is not None:
                    self._handle(answer.offer)
                elif answer.finished:
                    self._over()
                    if once:
                        return
                    self._stop.wait(_NO_RUN_S)
        except StoppedError:
            pass
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._line.close()

    def _ask(self) -> wire.Answer | None:
        """None: nobody is there now."""
        policy = self._home.policy()
        ask = wire.Ask(wait_s=wire.LONGEST_WAIT_S, answers=policy.figures)
        if self._info is not None:
            told = {"rows": policy.told_rows(self._info.rows)}
            counts = self._info.class_counts if policy.class_counts else ()
            ask = ask.model_copy(update={**told, "class_counts": counts})
        try:
            answer = self._line.tell_once("/ask", ask, wire.Answer)
        except AwayError as error:
            if not self._quiet:
                log.warning("the coordinator is away (%s); trying on", error)
            self._quiet = True
            self._stop.wait(1.0)
            return None
        except RefusedError as error:
            if error.status != 403:  # no run with this site is on: there may be one later
                raise
            if not self._quiet:
                log.info("%s", error.reason)
            self._quiet = True
            self._stop.wait(_NO_RUN_S)
            return None
        self._quiet = False
        return answer

    # ---- one offer

    def _handle(self, offer: wire.Offer) -> None:
        task = offer.task
        try:
            if offer.question is not None:
                self._answer(offer, offer.question)
            elif (update := self._prepare(offer)) is not None:
                self._release(offer, update)
        except RefusedError as error:
            if error.status in (401, 426):
                raise
            log.warning("round %d: %s", task.round, error)
            self._stop.wait(1.0)  # whatever it is, it will not be better at once
        except StoppedError:
            raise
        except FedPPDError as error:
            self._say_no(task, str(error), refused=False)

    def _allowed(self, offer: wire.Offer, policy: Policy) -> Work | None:
        """The worker for this offer; None, once that was said, where the policy says no."""
        try:
            why = policy.refusal_of(taken_config(offer.config, offer.client, self._rows))
            if why is None:
                work = self._worker(offer)
                self._info = work.info()
                why = policy.refusal(work.config, self._info.rows, self._home.updates_released())
        except (ConfigError, DataError) as error:
            self._say_no(offer.task, str(error), refused=True)
            return None
        if why is not None:
            self._say_no(offer.task, f"its policy says no: {why}", refused=True)
            return None
        return work

    def _answer(self, offer: wire.Offer, told: Mapping[str, Any]) -> None:
        """A question about rows that are kept back: the sums that answer it, written down first, then sent."""
        policy, task = self._home.policy(), offer.task
        if not policy.figures:
            self._say_no(task, "its policy says no: figures: nothing is told of rows that are kept back", refused=True)
            return
        work = self._allowed(offer, policy)
        if work is None:
            return
        models = wire.decode(self._line.fetch(offer.state, task, _MOST_BYTES))
        try:
            answer = work.answer(question_of(told), GlobalState(task.round - 1, models))
        except ValueError as error:
            self._say_no(task, str(error), refused=False)
            return
        message = wire.Told.of(task, answer)
        if answer is not None:
            numbers = sum(array.size for array in answer.values())
            self._home.record("answer", run=task.run, round=task.round - 1, question=dict(told), numbers=numbers)
        self._line.tell("/answers", message, wire.Wanted, task)

    def _prepare(self, offer: wire.Offer) -> Spooled | None:
        """The update of this offer: kept from before, or made now; None where there is none to send."""
        policy = self._home.policy()
        name = name_of_work(offer, self._rows, policy)
        if kept := self._home.spooled(name):
            return kept
        work = self._allowed(offer, policy)
        if work is None:
            return None
        models = wire.decode(self._line.fetch(offer.state, offer.task, _MOST_BYTES))
        log.info("round %d/%d: training", offer.task.round, work.config.federation.rounds)
        state, began = GlobalState(offer.task.round - 1, models), time.monotonic()
        update = self._watched(offer.task, work, self._threads.submit(work.update, name, offer, state, policy))
        if update is not None:
            log.info("round %d: trained in %.2f s", offer.task.round, time.monotonic() - began)
            self._home.spool(update)
        return update

    def _worker(self, offer: wire.Offer) -> Work:
        name = identity_of_run(offer, self._rows)
        if self._work is None or self._work[0] != name:
            self._work = (name, Work(offer, self._rows, self._device))
        return self._work[1]

    def _watched(self, task: wire.Task, work: Work, training: "Future[Spooled]") -> Spooled | None:
        """Beats while it trains; gives up what nobody waits for."""
        unwanted = 0
        while not wait([training], _BEAT_S).done:
            try:
                wanted = self._line.tell_once("/beat", wire.Beat(task=task), wire.Wanted, task).wanted
                unwanted = 0 if wanted else unwanted + 1
            except AwayError:
                unwanted = 0
            if unwanted >= _UNWANTED or self._stop.is_set():
                work.cancel(task.round)
                self._work = None
                wait([training])
                log.warning("round %d: given up, nobody waits for it", task.round)
                return None
        error = training.exception()
        if error is None:
            return training.result()
        log.debug("round %d", task.round, exc_info=error)
        self._say_no(task, f"{type(error).__name__}: {error}", refused=False)
        return None

    def _release(self, offer: wire.Offer, update: Spooled) -> None:
        """Written down first, then sent."""
        task, digest = offer.task, wire.digest_of(update.content)
        blob = wire.Blob(digest=digest, size=len(update.content))
        facts = {"run": task.run, "round": task.round, "bytes": blob.size, "digest": digest, "rows": update.rows}
        self._home.record("update", **facts, metrics=sorted(update.metrics))
        self._line.send(update.content, blob, task)
        commit = wire.Commit(task=task, digest=digest, rows=update.rows, metrics=update.metrics)
        done = self._line.tell("/commit", commit, wire.Done, task)
        log.info("round %d: update of %.1f MB %s", task.round, blob.size / 1e6, done.state)

    def _say_no(self, task: wire.Task, reason: str, refused: bool) -> None:
        log.warning("round %d: %s: %s", task.round, "refused" if refused else "failed", reason)
        self._home.record("refused" if refused else "failed", run=task.run, round=task.round, reason=reason)
        try:
            self._line.tell("/fail", wire.Fail(task=task, reason=reason[:2000], refused=refused), wire.Wanted, task)
        except RefusedError as error:
            if error.status in (401, 426):
                raise
            log.warning("round %d: nobody heard that (%s)", task.round, error)

    # ---- the end

    def _over(self) -> None:
        self._home.forget()
        try:
            if self._student is not None:
                fetch_student(self._line, self._joined.coordinator, self._student)
            self._line.tell_once("/bye", wire.Nothing(), wire.Nothing)
        except (RefusedError, AwayError, wire.WireError) as error:
            log.warning("the student was not fetched: %s; `fedppd site fetch` tries again", error)
        log.info("the run is over")


def fetch_student(line: Line, coordinator: str, out: Path) -> None:
    """The exported student with its card, once the coordinator's signature has been checked."""
    found = line.get("/student", wire.Card)
    if why := export_refusal(found.card.encode(), found.signature.encode(), coordinator):
        raise wire.WireError(f"the student {why}")
    weights = line.fetch(found.weights, None, _MOST_BYTES)
    folder = out / STUDENT
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WEIGHTS, weights)
    write_atomically(folder / SIGNATURE, found.signature.encode())
    write_atomically(folder / CARD, found.card.encode())
    log.info("student fetched to %s; serve it with: fedppd serve %s", folder, out)
