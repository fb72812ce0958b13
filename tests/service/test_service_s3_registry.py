"""A registry in object storage, against a real S3 API on loopback."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.releases.live import Decision
from fedppd_ray.releases.promotion import Superseded, Trial, Wish, end_trial, promote, rollback
from fedppd_ray.releases.registry import Registry, is_registry
from fedppd_ray.releases.state import State
from fedppd_ray.runs import remote
from fedppd_ray.runs.export import read_card
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from tests.service.exports import export_again

BUCKET = "fedppd-registry"
URL = f"s3://{BUCKET}/students"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}


@pytest.fixture(scope="module", autouse=True)
def storage() -> Iterator[object]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        host, port = server.get_host_and_port()
        settings = KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in (settings | {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}).items():
            patch.setenv(name, value)
        remote._s3_files.cache_clear()
        client = boto3.client("s3", endpoint_url=settings["AWS_ENDPOINT_URL"])
        client.create_bucket(Bucket=BUCKET)
        yield client
    remote._s3_files.cache_clear()
    server.stop()


@pytest.fixture
def make_run(digits_run: Path, tmp_path: Path) -> Callable[[int], Path]:
    def make(round_id: int) -> Path:
        run = Path(shutil.copytree(digits_run, tmp_path / f"run{round_id}"))
        export_again(run, round_id)
        return run

    return make


def test_a_registry_in_object_storage_is_promoted_to_served_and_rolled_back(
    make_run: Callable[[int], Path], tmp_path: Path
) -> None:
    assert not is_registry(URL)
    with pytest.raises(ConfigError, match="is no registry"):
        Registry.open(URL)
    gates = tmp_path / "gates.yaml"
    gates.write_text("offline: {accuracy: {at_least: 50}}")
    registry = Registry.open_or_create(URL)
    wish = Wish("ada@lab", gates)
    runs = [make_run(number) for number in (2, 3)]
    first = promote(runs[0], registry, wish).version
    predictor = Predictor(Settings(run=URL), Metrics())
    assert predictor.current.card == read_card(runs[0])
    second = promote(runs[1], registry, Wish("ada@lab", gates, Trial("shadow", 1.0))).version
    candidate = registry.state().candidate
    assert candidate is not None
    end_trial(registry, candidate, Decision(True, "live gates met"), "service")
    with pytest.raises(Superseded):
        end_trial(registry, candidate, Decision(False, "too late"), "another")
    assert predictor.refresh() is True
    assert predictor.current.card == read_card(runs[1])
    rollback(registry, "ada@lab", "a doctor complained")
    assert registry.state() == State(current=first)
    assert predictor.refresh() is True
    assert predictor.current.card == read_card(runs[0])
    assert [(entry.what, entry.version) for entry in registry.entries()] == [
        ("promoted", first),
        ("candidate", second),
        ("promoted", second),
        ("rolled back", second),
    ]
    assert [known["version"] for known in registry.versions()] == [first, second]


def test_many_writers_make_one_sequence_there_too() -> None:
    """An object is created only where there is none: two that read the same last line cannot both follow it."""
    place = f"s3://{BUCKET}/many"
    registry = Registry.open_or_create(place)

    def write(name: str) -> None:
        for _ in range(5):
            Registry.open(place).move(
                lambda state: state.with_current(name), who=name, what="promoted", version=name, why=""
            )

    threads = [threading.Thread(target=write, args=(f"writer{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = registry.entries()
    assert [entry.number for entry in entries] == list(range(1, 16))
    assert registry.state() == entries[-1].state


def test_a_version_that_was_changed_there_is_noticed(make_run: Callable[[int], Path], storage: object) -> None:
    place = f"s3://{BUCKET}/changed"
    registry = Registry.open_or_create(place)
    run = make_run(9)
    version = registry.stage(run)
    registry.seal(version, {}, run, "ada")
    registry.verified(version)
    card = json.loads((run / "student" / "model.json").read_text()) | {"name": "another"}
    key = f"changed/versions/{version}/student/model.json"
    storage.put_object(Bucket=BUCKET, Key=key, Body=json.dumps(card).encode())  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="not what was registered"):
        registry.verified(version)
