"""MLflow's registry as a target, in an SQLite file: MLflow's real client and store."""

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
pytest.importorskip("sqlalchemy", reason="MLflow's SQLite store needs sqlalchemy")

from mlflow import MlflowClient

from fedppd_ray.errors import ConfigError
from fedppd_ray.releases.promotion import Trial, Wish
from fedppd_ray.releases.targets import target_at
from fedppd_ray.runs.export import export_student, read_card, read_student
from fedppd_ray.runs.store import RunStore


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return MlflowClient()


def next_run(finished: Path, folder: Path, round_id: int) -> Path:
    run = Path(shutil.copytree(finished, folder / f"run{round_id}"))
    card, model = read_student(run)
    model.weights.mul_(1 + 1e-4 * round_id)
    export_student(run, RunStore(run).config(), round_id, model, card["metrics"], card["abstention"])
    return run


def test_versions_aliases_and_tags_say_what_gates_decided(
    client: MlflowClient, finished_run: Path, tmp_path: Path
) -> None:
    target = target_at("mlflow://triage")
    gates = tmp_path / "gates.yaml"
    gates.write_text("offline: {accuracy: {at_least: 0, worse_by: 100}}")
    first, second = (next_run(finished_run, tmp_path, number) for number in (3, 4))
    wish = Wish("ada@lab", gates)
    assert target.promote(str(first), wish).version == "1"
    with pytest.raises(ConfigError, match="current already"):
        target.promote(str(first), wish)
    verdict = target.promote(str(second), wish)
    assert (verdict.version, verdict.against) == ("2", "1")
    assert all(check.current != "–" for check in verdict.checks), "current was fetched and judged on the same rows"
    known = client.get_model_version_by_alias("triage", "current")
    assert str(known.version) == "2"
    assert known.tags["fedppd.sha256"] == read_card(second)["sha256"]
    decision = json.loads(known.tags["fedppd.decision"])
    assert (decision["who"], decision["what"]) == ("ada@lab", "promoted")
    folder = client.download_artifacts(known.run_id, "export", str(tmp_path))
    assert read_card(folder) == read_card(second)
    assert client.get_run(known.run_id).data.metrics["accuracy"] == pytest.approx(
        read_card(second)["metrics"]["accuracy"]
    )

    assert "current is 1" in target.rollback("ada@lab", "too slow", None, False)
    assert [row["status"] for row in target.versions()] == ["current", ""]
    assert target.promote("2", Wish("ada@lab", trial=Trial("wait", 0.0))).version == "2"
    assert [row["status"] for row in target.versions()] == ["current", "candidate"]
    target.rollback("ada@lab", "", None, True)
    assert [row["status"] for row in target.versions()] == ["current", ""]


def test_what_is_refused_is_registered_and_moves_no_alias(
    client: MlflowClient, finished_run: Path, tmp_path: Path
) -> None:
    gates = tmp_path / "gates.yaml"
    gates.write_text("offline: {accuracy: {at_least: 100.1}}")
    target = target_at("mlflow://triage")
    assert not target.promote(str(finished_run), Wish("ada", gates)).let_through
    assert dict(client.get_registered_model("triage").aliases) == {}
    assert [row["status"] for row in target.versions()] == ["refused"]


@pytest.mark.usefixtures("client")
def test_mistakes_are_one_line(finished_run: Path) -> None:
    with pytest.raises(ConfigError, match="names no model"):
        target_at("mlflow://")
    with pytest.raises(ConfigError, match="no service follows"):
        target_at("mlflow://triage").promote(str(finished_run), Wish("ada", trial=Trial("shadow", 1.0)))
    with pytest.raises(ConfigError, match="no other version"):
        target_at("mlflow://triage").rollback("ada", "", None, False)
