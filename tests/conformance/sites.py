"""Every client as a site of its own: a door over TLS in this process, and the real agents, each in a thread."""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fedppd_ray.config.schema import Config
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.sites.agent import Agent, join
from fedppd_ray.sites.coordinator import Listen, open_door
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.home import Home
from fedppd_ray.sites.mailbox import Mailbox
from fedppd_ray.sites.pool import SiteExecutor
from fedppd_ray.sites.tls import Tls
from fedppd_ray.sites.work import Rows, told_config
from tests.sites.house import free_port, make_certificates, wait_for

# What the others tell without being asked; and as few rows as these tests have.
OPEN = {
    "figures: false": "figures: true",
    "fewest_rows: 10": "fewest_rows: 1",
}


class Sites(SiteExecutor):
    """A `SiteExecutor` whose sites are here. `places`: where a client's rows lie; who has none gets its share."""

    def __init__(self, config: Config, clients: list[str], folder: Path, places: Mapping[str, Path]) -> None:
        told = told_config(config)
        super().__init__(config, {c: Mailbox(f"site-{c}", c, "ab" * 16, told, 120.0) for c in clients})
        self._stop, self._stack, self._threads = threading.Event(), ExitStack(), list[threading.Thread]()
        folder.mkdir()
        ca, certificate, key = make_certificates(folder)
        guests, port = Guests(folder / "guests"), free_port()
        listen = Listen("127.0.0.1", port, certificate, key, guests.folder)
        by_site = {box.site: box for box in self.boxes.values()}
        self._gateway = self._stack.enter_context(open_door(listen, guests, by_site, None))
        for client, box in self.boxes.items():
            home, rows = Home(folder / box.site), Rows(places.get(client) or _deal(config, client, folder))
            home.init()
            _allow(home.folder / "policy.yaml")
            join(home, box.site, f"https://127.0.0.1:{port}", guests.invite(box.site, 1.0), Tls(str(ca)))
            agent = Agent(home, rows, self._stop)
            self._threads.append(threading.Thread(target=agent.run, args=(False,), daemon=True))
            self._threads[-1].start()
        wait_for(lambda: set(self._gateway.heard) == set(by_site), 60, "all sites")

    def close(self) -> None:
        self._stop.set()
        self._gateway.heard.clear()  # nobody is waited for
        self._stack.close()
        for thread in self._threads:
            thread.join(30)


def _allow(policy: Path) -> None:
    text = policy.read_text()
    for old, new in OPEN.items():
        assert old in text, old
        text = text.replace(old, new)
    policy.write_text(text)


def _deal(config: Config, client: str, folder: Path) -> Path:
    """The rows that the configuration deals to this client, in a folder of its own."""
    split, place = Holdings(config, [client]).of(client), folder / f"rows-{client}"
    place.mkdir()
    np.save(place / "images.npy", np.ascontiguousarray(split.images[:, 0]))
    np.save(place / "labels.npy", np.asarray(split.labels))
    return place
