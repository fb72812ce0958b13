"""A run, whichever executor does the work: what it leaves on disk, and that a crash loses nothing."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fedppd_ray.runs.export as export_module
import fedppd_ray.runs.store as store_module
import fedppd_ray.runs.training as training_module
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.errors import FedPPDError, QuorumError, ServerLostError
from fedppd_ray.federation.executor import Arrival, Lost
from fedppd_ray.federation.round import select_clients
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import network_predictor
from fedppd_ray.inference.scores import entropy
from fedppd_ray.inference.temperature import scaled
from fedppd_ray.methods.base import ServerResult
from fedppd_ray.methods.fedppd import FedPPDAggregation
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.run import evaluate_run
from fedppd_ray.runs.store import RunStore
from fedppd_ray.runs.training import Training
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.serial import SerialClients, SerialExecutor, SerialServer
from fedppd_ray.workers.server import ServerWorker

Tiny = Callable[..., Config]
Run = Callable[..., Any]


class Killed(BaseException):
    """Stands for `kill -9`: nothing in the code may catch it."""


@pytest.fixture(scope="module")
def uninterrupted(tiny: Tiny, train_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train_run(tiny(), folder)
    return folder


def student(run: Path) -> bytes:
    return (run / "student" / "student.safetensors").read_bytes()


def card(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "student" / "model.json").read_text())
    return loaded


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in ("seconds", "time")} for record in records]


def same_state(first: GlobalState, second: GlobalState) -> bool:
    return first.round == second.round and all(
        np.array_equal(first.models[role], second.models[role]) for role in first.models
    )


def test_a_run_leaves_what_other_work_relies_on(uninterrupted: Path, tiny: Tiny) -> None:
    names = {str(path.relative_to(uninterrupted)) for path in uninterrupted.rglob("*") if path.is_file()}
    assert names >= {
        "config.yaml",
        "metrics.jsonl",
        "clients.json",
        "student/student.safetensors",
        "student/model.json",
    }
    assert yaml.safe_load((uninterrupted / "config.yaml").read_text()) == tiny().values()
    assert [info.rows for info in RunStore(uninterrupted).clients()] == [24, 24, 24]


def test_metrics_have_a_line_a_round_with_the_agreed_fields(uninterrupted: Path) -> None:
    records = lines(uninterrupted)
    agreed = {"round", "time", "accuracy", "nll", "ece", "mce", "brier", "seconds", "clients", "failed"}
    assert [record["round"] for record in records] == [1, 2, 3]
    for record in records:
        assert set(record) == agreed | {"failures", "rows", "megabytes", "calibration_nll", "teacher_accuracy"}
        assert (record["clients"], record["failed"], record["failures"], record["rows"]) == (3, 0, [], 72)
        assert 0 <= record["accuracy"] <= 100
        assert 0 <= record["brier"] <= 2
        assert record["seconds"] > 0
        # (21,840 + 85,670) float32 down to and up from three clients.
        assert record["megabytes"] == pytest.approx(107_510 * 4 * 6 / 1e6, abs=1e-3)


def test_the_student_is_the_last_rounds_with_its_metrics_and_threshold(uninterrupted: Path, tiny: Tiny) -> None:
    last, exported = lines(uninterrupted)[-1], card(uninterrupted)
    assert exported["round"] == 3
    assert exported["metrics"] == {key: last[key] for key in ("accuracy", "nll", "ece", "mce", "brier")}
    assert exported["abstention"]["rows"] == 40
    assert exported["abstention"]["coverage"] == tiny().evaluation.coverage
    state = RunStore(uninterrupted).latest()
    flat = np.frombuffer(student(uninterrupted)[-4 * state.models["student"].size :], np.float32)
    assert sorted(flat.tolist()) == sorted(state.models["student"].tolist())


def test_figures_and_threshold_of_an_exported_network_are_its_own(tiny: Tiny, train_run: Run, tmp_path: Path) -> None:
    """FedSWAG predicts by thirty networks and exports one."""
    config = tiny(method="fedswag", federation={"rounds": 1}, client={"epochs": 3}, fedswag={"samples": 4})
    train_run(config, tmp_path / "run")
    exported, seen = card(tmp_path / "run"), evaluate_run(tmp_path / "run").figures
    assert exported["metrics"]["nll"] == pytest.approx(seen["nll"], abs=1e-9)
    assert exported["metrics"]["nll"] != pytest.approx(lines(tmp_path / "run")[-1]["nll"], abs=1e-9)
    held_out, (_, network) = HeldOut(config), read_student(tmp_path / "run")
    seen = held_out.log_probabilities(network_predictor(network), "calibration")
    entropies = entropy(scaled(seen, exported["temperature"]))
    assert (entropies <= exported["abstention"]["threshold"]).sum() == math.ceil(0.95 * 41)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tiny: Tiny, train_run: Run, tmp_path: Path, uninterrupted: Path
) -> None:
    train_run(tiny(federation={"rounds": 1}), tmp_path / "run")
    watcher = train_run(tiny(), tmp_path / "run", resume=True)
    assert watcher.first_round == 2
    assert student(tmp_path / "run") == student(uninterrupted)
    assert same_state(RunStore(tmp_path / "run").latest(), RunStore(uninterrupted).latest())
    assert without_time(lines(tmp_path / "run")) == without_time(lines(uninterrupted))
    assert card(tmp_path / "run") == card(uninterrupted)


# Each is called once per round, in this order.
MOMENTS: dict[str, tuple[Any, str]] = {
    "before the student": (export_module, "write_atomically"),
    "between the student and its card": (export_module, "write_json"),
    "before the checkpoint": (store_module, "write_checkpoint"),
    "after the checkpoint, before the line of metrics": (RunStore, "_append_metrics"),
}


def kill(patch: pytest.MonkeyPatch, moment: str, round_id: int) -> None:
    owner, name = MOMENTS[moment]
    real, calls = getattr(owner, name), []

    def dying(*args: Any, **rest: Any) -> Any:
        calls.append(moment)
        if len(calls) == round_id:
            raise Killed
        return real(*args, **rest)

    patch.setattr(owner, name, dying)


@pytest.mark.parametrize("round_id", [2, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_of_saving_resumes_to_equal_bits(
    tiny: Tiny,
    train_run: Run,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    round_id: int,
) -> None:
    with monkeypatch.context() as patch:
        kill(patch, moment, round_id)
        with pytest.raises(Killed):
            train_run(tiny(), tmp_path / "run")
    train_run(tiny(), tmp_path / "run", resume=True)
    assert student(tmp_path / "run") == student(uninterrupted)
    assert card(tmp_path / "run") == card(uninterrupted)
    assert without_time(lines(tmp_path / "run")) == without_time(lines(uninterrupted))


def test_rounds_between_evaluations_have_null_metrics_and_the_last_always_is_evaluated(
    tiny: Tiny, train_run: Run, tmp_path: Path, uninterrupted: Path
) -> None:
    watcher = train_run(tiny(evaluation={"every": 2}), tmp_path / "run")
    accuracies = [record["accuracy"] for record in lines(tmp_path / "run")]
    assert [accuracy is None for accuracy in accuracies] == [True, False, False]
    assert watcher.records == lines(tmp_path / "run")
    assert student(tmp_path / "run") == student(uninterrupted)


def test_a_student_is_exported_in_every_evaluated_round_and_in_no_other(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_run: Run
) -> None:
    rounds = []
    real = training_module.export_student

    def noting(run: Path, config: Config, round_id: int, *rest: Any) -> Any:
        rounds.append(round_id)
        return real(run, config, round_id, *rest)

    monkeypatch.setattr(training_module, "export_student", noting)
    train_run(tiny(federation={"rounds": 5}, evaluation={"every": 2}), tmp_path / "run")
    assert rounds == [2, 4, 5]


def test_without_calibration_rows_there_is_no_threshold(tiny: Tiny, train_run: Run, tmp_path: Path) -> None:
    train_run(tiny(federation={"rounds": 1}, data={"calibration": 0}), tmp_path / "run")
    assert card(tmp_path / "run")["abstention"] is None


def test_distill_trains_end_to_end_and_resumes_to_equal_bits(tiny: Tiny, train_run: Run, tmp_path: Path) -> None:
    distill = {"server": {"aggregate": "distill"}}
    train_run(tiny(federation={"rounds": 2}, **distill), tmp_path / "whole")
    train_run(tiny(federation={"rounds": 1}, **distill), tmp_path / "parts")
    train_run(tiny(federation={"rounds": 2}, **distill), tmp_path / "parts", resume=True)
    assert student(tmp_path / "parts") == student(tmp_path / "whole")
    state = RunStore(tmp_path / "whole").latest()
    assert all(np.isfinite(vector).all() and vector.any() for vector in state.models.values())


def test_the_aggregate_makes_a_difference(tiny: Tiny, train_run: Run, tmp_path: Path, uninterrupted: Path) -> None:
    train_run(tiny(server={"aggregate": "distill"}), tmp_path / "run")
    assert student(tmp_path / "run") != student(uninterrupted)


def test_participation_is_sampled_and_recorded(tiny: Tiny, train_run: Run, tmp_path: Path) -> None:
    config = tiny(federation={"participation": 0.67, "rounds": 4})
    watcher = train_run(config, tmp_path / "run")
    assert [record["clients"] for record in lines(tmp_path / "run")] == [2] * 4
    expected = [select_clients(client_ids(3), 0.67, config.seed, round_id) for round_id in range(1, 5)]
    assert watcher.selected == expected
    assert [receipt.client for receipt in watcher.done] == [client for selected in expected for client in selected]


class FaultyExecutor(SerialExecutor):
    """The real executor; given clients fail in given rounds, and the server may be lost."""

    def __init__(
        self, config: Config, bad: dict[int, set[str]] | None = None, lost: dict[int, int] | None = None
    ) -> None:
        clients = client_ids(config.federation.clients)
        super().__init__(config, clients)
        self.server = FaultyServer(config, dict(lost or {}))
        self.clients = FaultyClients(ClientWorker(config, clients), bad or {})
        self.evaluation = self.server


class FaultyServer(SerialServer):
    def __init__(self, config: Config, losses: dict[int, int]) -> None:
        super().__init__(ServerWorker(config))
        self._config, self._losses, self._round = config, losses, 0

    def begin(self, round_id: int) -> GlobalState:
        self._round = round_id
        return super().begin(round_id)

    def finish(self) -> None:
        if self._losses.get(self._round, 0) > 0:
            self._losses[self._round] -= 1
            self._worker = ServerWorker(self._config)  # as a new process: without a state
            raise ServerLostError("the server's process died")
        super().finish()

    def predict(self, split: str) -> Any:
        return self._worker.predict(split)


class FaultyClients(SerialClients):
    def __init__(self, worker: ClientWorker, bad: dict[int, set[str]]) -> None:
        super().__init__(worker)
        self._bad, self._round = bad, 0

    def open(self, round_id: int, published: object) -> None:
        self._round = round_id
        super().open(round_id, published)

    def next_event(self) -> Arrival | Lost:
        event = super().next_event()
        return Lost(event.client, "pulled the plug") if event.client in self._bad.get(self._round, ()) else event


def run_with(executor: FaultyExecutor, config: Config, folder: Path, watcher: Any) -> None:
    store = RunStore(folder)
    store.create(config)
    Training(config, store, executor, watcher).run_rounds(None)


def test_a_dropped_client_is_in_the_record_with_its_reason(tiny: Tiny, tmp_path: Path, watcher: Any) -> None:
    executor = FaultyExecutor(tiny(), bad={2: {"client-01"}})
    run_with(executor, tiny(), tmp_path / "run", watcher)
    records = lines(tmp_path / "run")
    assert [(record["clients"], record["failed"]) for record in records] == [(3, 0), (2, 1), (3, 0)]
    assert records[1]["failures"] == [{"client": "client-01", "reason": "pulled the plug"}]
    assert records[1]["rows"] == 48
    assert len(watcher.failed) == 2  # retried, then dropped


def test_below_quorum_the_run_stops_with_everything_saved_and_resumes(
    tiny: Tiny, train_run: Run, tmp_path: Path, watcher: Any, uninterrupted: Path
) -> None:
    executor = FaultyExecutor(tiny(), bad={3: {"client-00", "client-02"}})
    with pytest.raises(QuorumError, match="round 3: 1 of 3 clients delivered"):
        run_with(executor, tiny(), tmp_path / "run", watcher)
    assert RunStore(tmp_path / "run").latest().round == 2
    assert [record["round"] for record in lines(tmp_path / "run")] == [1, 2]
    train_run(tiny(), tmp_path / "run", resume=True)
    assert student(tmp_path / "run") == student(uninterrupted)


def test_a_lost_server_repeats_the_round_with_equal_bits(
    tiny: Tiny, tmp_path: Path, watcher: Any, uninterrupted: Path
) -> None:
    run_with(FaultyExecutor(tiny(), lost={2: 2}), tiny(), tmp_path / "run", watcher)
    assert watcher.lost == [2, 2]
    assert student(tmp_path / "run") == student(uninterrupted)


def test_a_server_that_is_lost_again_and_again_ends_the_run(tiny: Tiny, tmp_path: Path, watcher: Any) -> None:
    with pytest.raises(ServerLostError):
        run_with(FaultyExecutor(tiny(), lost={2: 99}), tiny(), tmp_path / "run", watcher)
    assert RunStore(tmp_path / "run").latest().round == 1
    assert watcher.lost == [2, 2, 2]


def test_a_diverged_server_update_stops_the_run_and_never_becomes_the_state(
    tiny: Tiny, tmp_path: Path, watcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FedPPDAggregation.finish

    def diverging(aggregation: FedPPDAggregation, pool: Any) -> Any:
        result = real(aggregation, pool)
        result.models["teacher"][5] = np.nan
        return result

    monkeypatch.setattr(FedPPDAggregation, "finish", diverging)
    executor = FaultyExecutor(tiny())
    with pytest.raises(FedPPDError, match=r"round 1: the server's update of the teacher diverged"):
        run_with(executor, tiny(), tmp_path / "run", watcher)
    assert executor.server.state().round == 0
    assert all(np.isfinite(vector).all() for vector in executor.server.state().models.values())


def test_predictions_that_are_not_finite_stop_the_run_before_it_is_saved(
    tiny: Tiny, tmp_path: Path, watcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FedPPDAggregation.finish

    def overflowing(aggregation: FedPPDAggregation, pool: Any) -> Any:
        models = real(aggregation, pool).models
        return ServerResult({role: np.full_like(vector, 3e38) for role, vector in models.items()})

    monkeypatch.setattr(FedPPDAggregation, "finish", overflowing)
    with pytest.raises(FedPPDError, match=r"round 1: the student's predictions .* not finite.*lower student\.rate"):
        run_with(FaultyExecutor(tiny()), tiny(), tmp_path / "run", watcher)
    assert not (tmp_path / "run" / "student").exists()
    assert RunStore(tmp_path / "run").resume(tiny()) is None
