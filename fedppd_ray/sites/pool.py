"""The executor of a coordinator without Ray: the server in this process, sites over HTTPS, other clients one by one."""

import logging
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from fedppd_ray.config.schema import Config
from fedppd_ray.errors import FedPPDError, LocalUpdateCancelled
from fedppd_ray.federation.executor import Arrival, Lost
from fedppd_ray.federation.types import ClientInfo, GlobalState
from fedppd_ray.inference.questions import Answer, Question
from fedppd_ray.sites.mailbox import Mailbox
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.serial import SerialClients, SerialEvaluator, SerialServer
from fedppd_ray.workers.server import ServerWorker

log = logging.getLogger(__name__)


class SiteClients:
    """Sites, each waited for in a thread of its own; beside them, clients of this process."""

    def __init__(self, boxes: Mapping[str, Mailbox], local: SerialClients | None, deadline_s: float | None) -> None:
        """`boxes`: client → its mailbox."""
        self._boxes, self._local, self._deadline_s = boxes, local, deadline_s
        self._events: queue.Queue[tuple[int, Arrival | Lost]] = queue.Queue()
        self._published: GlobalState | None = None
        self._opened = 0  # attempts at rounds: answers to an earlier one count no more
        self._local_waiting = 0

    def describe(self) -> list[ClientInfo]:
        infos = [box.info() or ClientInfo(client, 0, ()) for client, box in self._boxes.items()]
        if self._local is not None:
            infos += self._local.describe()
        return sorted(infos, key=lambda info: info.client)

    def ask(self, question: Question, state: GlobalState) -> dict[str, Answer]:
        found = {} if self._local is None else self._local.ask(question, state)
        with ThreadPoolExecutor(max(1, len(self._boxes))) as threads:
            asked = {client: threads.submit(box.ask_about, state, question) for client, box in self._boxes.items()}
            for client, answer in asked.items():
                try:
                    numbers = answer.result()
                except FedPPDError as error:
                    log.warning("%s has not answered: %s", client, error)
                    continue
                if numbers is not None:
                    found[client] = numbers
        return dict(sorted(found.items()))

    def open(self, round_id: int, published: object) -> None:
        if not isinstance(published, GlobalState):
            raise TypeError("not a state of this executor")
        self._opened += 1
        self._published = published
        self._local_waiting = 0
        for box in self._boxes.values():
            box.cancel(round_id)
        if self._local is not None:
            self._local.open(round_id, published)

    def start(self, client: str) -> None:
        if client in self._boxes:
            arguments = (self._opened, client, self._published)
            threading.Thread(target=self._wait, args=arguments, name=f"site-{client}", daemon=True).start()
        elif self._local is not None:
            self._local_waiting += 1
            self._local.start(client)

    def next_event(self) -> Arrival | Lost:
        if self._local_waiting and self._local is not None:
            self._local_waiting -= 1
            return self._local.next_event()
        while True:
            opened, event = self._events.get()
            if opened == self._opened:
                return event

    def _wait(self, opened: int, client: str, state: GlobalState) -> None:
        box, late = self._boxes[client], threading.Event()

        def too_late() -> None:
            late.set()
            box.cancel(state.round + 1)

        timer = None
        if self._deadline_s is not None:
            timer = threading.Timer(self._deadline_s, too_late)
            timer.daemon = True
            timer.start()
        try:
            update = box.ask(state)
            event: Arrival | Lost = Arrival(client, update.receipt, update.models)
        except LocalUpdateCancelled as error:
            text = f"no answer within federation.deadline_s={self._deadline_s}" if late.is_set() else str(error)
            event = Lost(client, text, late=late.is_set())
        except Exception as error:  # whatever it is, it costs this client its attempt, not the run
            event = Lost(client, f"{type(error).__name__}: {error}")
        finally:
            if timer is not None:
                timer.cancel()
        self._events.put((opened, event))


class SiteExecutor:
    def __init__(self, config: Config, boxes: Mapping[str, Mailbox]) -> None:
        """`boxes`: client → its mailbox, of those that are sites."""
        torch.set_num_threads(1)
        self.boxes = boxes
        worker = ServerWorker(config)
        here = [client for client in config.client_names if client not in boxes]
        local = SerialClients(ClientWorker(config, here)) if here else None
        self.server = SerialServer(worker)
        self.clients = SiteClients(boxes, local, config.federation.deadline_s)
        self.evaluation = SerialEvaluator(worker)

    def close(self) -> None:
        return None
