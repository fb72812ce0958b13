"""What a site makes of an offer: from rows of any kind that the product reads, what a client in a cluster would."""

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedppd_ray.config.file import load_config, parse_config
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.sites import wire
from fedppd_ray.sites.policy import Policy
from fedppd_ray.sites.work import Rows, Work, told_config
from fedppd_ray.workers.client import ClientWorker


def table(path: Path, rows: int, seed: int) -> Path:
    generator = np.random.Generator(np.random.PCG64(seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("age", "ward", "outcome"))
        for age, ward in zip(generator.normal(60, 12, rows), generator.integers(3, size=rows), strict=True):
            writer.writerow((f"{age:.2f}", "abc"[ward], "ill" if age + 8 * (ward == 2) > 62 else "well"))
    return path


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_site_with_a_table_gives_what_an_actor_with_it_gives(tmp_path: Path, as_folder: bool) -> None:
    table(tmp_path / "coordinator" / "train.csv", 60, 0)
    table(tmp_path / "coordinator" / "test.csv", 20, 1)
    own = table(tmp_path / "site" / "table.csv", 40, 2)
    rows = Rows(own.parent if as_folder else own, table(tmp_path / "kept" / "table.csv", 25, 3))
    values = {
        "data": {"name": "table", "root": str(tmp_path / "coordinator"), "table": {"target": "outcome"}},
        "federation": {"clients": 2, "rounds": 1},
        "client": {"epochs": 1, "batch_size": 16},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**values, "clients": {"client-00": {"site": "hospital-a"}}}))
    at_site = load_config(tmp_path / "config.yaml")
    state = GlobalState(0, build_method(at_site).initial_models())
    body = wire.encode(state.models)
    task = wire.Task(run="ab" * 16, round=1, attempt=1)
    offer = wire.Offer(task=task, client="client-00", config=told_config(at_site), state=body.blob)
    offer = wire.Offer.model_validate_json(offer.model_dump_json())  # as it arrives
    assert "coordinator" not in offer.model_dump_json()  # no path of the other house
    work = Work(offer, rows, "cpu")
    assert work.info().rows == 40
    made = work.update("work", offer, state, Policy(figures=True))
    with_rows = parse_config({**at_site.values(), "clients": {"client-00": {"data": str(own)}}})
    actor = ClientWorker(with_rows, ["client-00"])
    assert made.content == wire.encode(actor.local_update("client-00", state).models).content
    assert made.metrics["site/rows"] == 25
    assert 0 <= made.metrics["site/accuracy"] <= 100
    before = rows.fingerprint()
    table(own, 41, 2)
    assert rows.fingerprint() != before
