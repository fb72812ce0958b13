"""Who draws from which random stream: two different draws of a run never share one."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedppd_ray.seeding as seeding
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.federation.round import select_clients
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Receipt
from fedppd_ray.methods import build_method
from fedppd_ray.runs.store import RunStore
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.server import ServerWorker

Tiny = Callable[..., Config]
Name = tuple[str, int, str]  # stream, round, client

# Derived anew wherever they are needed, so that all parts of a run agree: the same numbers on purpose.
SHARED = ("partition", "init/", "construct/", "ood/", "swag/", "active/start", "active/random", "drift")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Counter[Name]:
    """How often each stream is opened, torch's and numpy's."""
    opened: Counter[Name] = Counter()
    real = seeding._identity

    def recording(seed: int, stream: str, round_id: int, client: str) -> bytes:
        opened[stream, round_id, client] += 1
        return real(seed, stream, round_id, client)

    monkeypatch.setattr(seeding, "_identity", recording)
    return opened


def opened_once(streams: Counter[Name]) -> set[Name]:
    """The streams of a run that are nobody else's; fails where one was opened twice."""
    own = {name: count for name, count in streams.items() if not name[0].startswith(SHARED)}
    assert {name for name, count in own.items() if count > 1} == set(), "opened twice: the same numbers twice"
    return set(own)


def expected(rounds: int, *streams: str, clients: int = 3) -> set[Name]:
    """`local` for each client of each round, and these for each round."""
    numbers = range(1, rounds + 1)
    local = {("local", number, f"client-{k:02d}") for number in numbers for k in range(clients)}
    return local | {(stream, number, "") for number in numbers for stream in streams}


def mixing(rounds: int) -> set[Name]:
    """FedPPD's clients have a stream for mixup, used or not."""
    return {("mixup", number, client) for number in range(1, rounds + 1) for client in client_ids(3)}


def test_every_client_round_and_role_of_fedppd_has_a_stream_of_its_own(
    tiny: Tiny, train_run: Callable[..., Any], tmp_path: Path, streams: Counter[Name]
) -> None:
    train_run(tiny(server={"aggregate": "distill"}), tmp_path / "run")
    roles = [f"{purpose}/{role}" for purpose in ("gaussian", "distil") for role in ("teacher", "student")]
    assert opened_once(streams) == expected(3, *roles) | mixing(3)
    assert {name[0] for name in streams} >= {"init/teacher", "init/student"}


def test_so_have_those_of_fedbe(
    tiny: Tiny, train_run: Callable[..., Any], tmp_path: Path, streams: Counter[Name]
) -> None:
    config = tiny(method="fedbe", baseline={"rate": 0.02}, federation={"rounds": 2})
    train_run(config, tmp_path / "run")
    assert opened_once(streams) == expected(2, "gaussian/model", "distil/model")


def test_participation_is_drawn_anew_in_every_round(
    tiny: Tiny, train_run: Callable[..., Any], tmp_path: Path, streams: Counter[Name]
) -> None:
    config = tiny(federation={"clients": 5, "participation": 0.4, "rounds": 3}, evaluation={"every": 3})
    watcher = train_run(config, tmp_path / "run")
    drawn = opened_once(streams)
    assert {name for name in drawn if name[0] == "participation"} == {("participation", n, "") for n in (1, 2, 3)}
    chosen = {("local", number, client) for number, group in enumerate(watcher.selected, 1) for client in group}
    assert {name for name in drawn if name[0] == "local"} == chosen


def test_who_takes_part_differs_between_rounds_and_seeds() -> None:
    clients = [f"client-{k:02d}" for k in range(20)]
    groups = {(seed, n): tuple(select_clients(clients, 0.25, seed, n)) for seed in (0, 1) for n in range(1, 11)}
    assert len(set(groups.values())) == 20
    assert all(len(group) == 5 for group in groups.values())


def test_random_acquisition_draws_anew_for_every_step_and_client(tiny: Tiny, streams: Counter[Name]) -> None:
    active = {"labelled": 4, "pool": 20, "budget": 4, "acquisition": "random"}
    config = tiny(active=active)
    models = build_method(config).initial_models()
    worker = ClientWorker(config, ["client-00", "client-01"], acquisition_states=[GlobalState(1, models)] * 3)
    worker.describe()
    random = {name: count for name, count in streams.items() if name[0] == "active/random"}
    assert random == {("active/random", step, f"client-{k:02d}"): 1 for step in (1, 2, 3) for k in (0, 1)}
    assert {name[2] for name in streams if name[0] == "active/start"} == {"client-00", "client-01"}


@pytest.mark.parametrize("method", ["fedppd", "fedavg", "fedbe", "fedswag", "fedpa"])
def test_a_local_update_depends_on_client_round_and_seed(method: str, tiny: Tiny) -> None:
    """The same rows and the same models: all that differs is the stream."""
    own = {} if method == "fedppd" else {"baseline": {"rate": 0.02}}
    config = tiny(method=method, federation={"rounds": 9}, client={"epochs": 2}, **own)
    models = build_method(config).initial_models()
    held = Holdings(config, ["client-00"]).of("client-00")
    shard = ImageShard(held.images, held.labels, config.dataset)

    def update(seed: int, round_id: int, client: str) -> bytes:
        worker = build_method(config.model_copy(update={"seed": seed}))
        sent = worker.local_update(client, GlobalState(round_id - 1, models), shard, lambda: False).models
        return b"".join(sent[role].tobytes() for role in sorted(sent))

    made = {
        update(*who) for who in ((3, 1, "client-00"), (3, 2, "client-00"), (3, 1, "client-01"), (4, 1, "client-00"))
    }
    assert len(made) == 4


@pytest.mark.parametrize(("samples", "epochs"), [(3, 1), (0, 4)])
def test_the_servers_distillation_draws_anew_in_every_round(tiny: Tiny, samples: int, epochs: int) -> None:
    """With and without models drawn from the Gaussian: its draws, and the order of the rows."""
    distill = {"samples": samples, "epochs": epochs, "teacher_rate": 0.05, "spread": 1.0}
    config = tiny(method="fedbe", baseline={"rate": 0.02}, server={"distill": distill})
    start = build_method(config).initial_models()["model"]
    sent = [start + np.float32(0.1) * np.sign(np.roll(start, k)) for k in range(2)]

    def result(round_id: int) -> bytes:
        server = ServerWorker(config)
        server.install(GlobalState(round_id - 1, {"model": start}))
        server.begin(round_id)
        for k, vector in enumerate(sent):
            server.fold(ClientUpdate(Receipt(f"client-{k:02d}", round_id, 10), {"model": vector}))
        server.finish()
        return server.state().models["model"].tobytes()

    assert len({result(1), result(2), result(3)}) == 3
    assert result(2) == result(2)


def test_a_resumed_run_goes_on_with_the_streams_of_its_own_rounds(
    tiny: Tiny, train_run: Callable[..., Any], tmp_path: Path, streams: Counter[Name]
) -> None:
    train_run(tiny(federation={"rounds": 1}), tmp_path / "run")
    train_run(tiny(federation={"rounds": 3}), tmp_path / "run", resume=True)
    assert opened_once(streams) == expected(3) | mixing(3)
    assert RunStore(tmp_path / "run").latest().round == 3
