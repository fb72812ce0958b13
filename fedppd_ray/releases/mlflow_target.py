"""MLflow's model registry as a target: `mlflow://MODEL`, at $MLFLOW_TRACKING_URI and $MLFLOW_REGISTRY_URI.

Versions are MLflow's, numbered from 1. The aliases `current` and `candidate` are the pointers; tags of a version say
what the gates said, who decided and why. `fedppd serve` follows registries of its own, so there are no live trials.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedppd_ray.errors import ConfigError, FedPPDError
from fedppd_ray.releases.figures import Figures, side_by_side
from fedppd_ray.releases.live import LiveGates
from fedppd_ray.releases.promotion import Wish, gates_for, judged, require_free
from fedppd_ray.releases.registry import Registry
from fedppd_ray.releases.state import Candidate, State, now
from fedppd_ray.releases.verdict import Verdict
from fedppd_ray.runs.export import read_card

CURRENT, CANDIDATE = "current", "candidate"
_EXPORT = "export"
_TAG = "fedppd."


class MlflowTarget:
    def __init__(self, model: str) -> None:
        if not model or "/" in model or ":" in model:
            raise ConfigError(
                f"mlflow://{model}: names no model; give mlflow://MODEL, and the server by $MLFLOW_TRACKING_URI"
            )
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise ConfigError(f"mlflow://{model}: needs an extra ({error}); pip install 'fedppd-ray[mlflow]'") from None
        with _explained(model):
            self._client = MlflowClient()
        self._model = model

    # ---- promote

    def promote(self, run: str, wish: Wish) -> Verdict:
        if wish.trial is not None and wish.trial.mode != "wait":
            raise ConfigError("--shadow, --canary: no service follows MLflow's registry; take --candidate")
        with _explained(self._model):
            state = self._state()
            require_free(state, wish)
            return self._promoted_version(run, wish, state) if run.isdigit() else self._promoted_run(run, wish, state)

    def _promoted_run(self, run: str, wish: Wish, state: State) -> Verdict:
        gates, source = gates_for(wish, None, "")
        with tempfile.TemporaryDirectory(prefix="fedppd-mlflow-") as temporary:
            shelf = Registry.open_or_create(Path(temporary) / "shelf")
            staged = shelf.stage(run)
            mine = Path(shelf.folder_of(staged))
            known = self._by_digest(staged)
            if known is not None and known == state.current:
                raise ConfigError(f"{run}: its student is current already (version {known})")
            theirs = self._fetched(state.current, Path(temporary) / "current") if state.current else None
            figures, beside = side_by_side(run, mine, theirs)
            verdict = judged(staged, state.current, figures, beside, gates, source, wish)
            version = known or self._registered(run, mine, staged, figures, verdict)
        verdict = verdict.model_copy(update={"version": version})
        self._carry_out(verdict, wish, state)
        return verdict

    def _promoted_version(self, version: str, wish: Wish, state: State) -> Verdict:
        found = self._client.get_model_version(self._model, version)
        before = Verdict.model_validate_json(self._artifact(found, "verdict.json"))
        passed = before.passed
        update = {
            "version": version,
            "who": wish.who,
            "at": now(),
            "reason": wish.reason or f"as judged on {before.at}",
        }
        verdict = before.model_copy(update={**update, "forced": wish.force and not passed})
        self._carry_out(verdict, wish, state)
        return verdict

    def _registered(self, run: str, folder: Path, staged: str, figures: Figures, verdict: Verdict) -> str:
        """An MLflow run with figures, student and verdict, and a version of the model that points to it."""
        client, card = self._client, read_card(folder)
        self._make_model()
        experiment = client.get_experiment_by_name(self._model)
        made = client.create_run(
            experiment.experiment_id if experiment else client.create_experiment(self._model), run_name=staged
        )
        where = made.info.run_id
        for key in ("method", "network", "round", "config_hash"):
            client.log_param(where, key, card[key])
        for name, value in figures.items():
            if value is not None:
                client.log_metric(where, name, value)
        (folder / "verdict.json").write_text(verdict.model_dump_json(indent=2), encoding="utf-8")
        (folder / "verdict.md").write_text(verdict.markdown(), encoding="utf-8")
        client.log_artifacts(where, str(folder), _EXPORT)
        client.set_terminated(where)
        tags = {f"{_TAG}export": staged, f"{_TAG}sha256": card["sha256"], f"{_TAG}source": run}
        version = client.create_model_version(
            self._model, f"{made.info.artifact_uri}/{_EXPORT}", where, tags=tags, description=verdict.markdown()
        )
        return str(version.version)

    def _make_model(self) -> None:
        if not self._client.search_registered_models(f"name = '{self._model}'"):
            self._client.create_registered_model(self._model)

    def _carry_out(self, verdict: Verdict, wish: Wish, state: State) -> None:
        version = verdict.version
        what = "refused" if not verdict.let_through else CANDIDATE if wish.trial else "promoted"
        self._note(version, what, wish.who, verdict.why(), verdict.forced)
        if not verdict.let_through:
            return
        if wish.trial is None and state.current is not None:
            self._client.set_model_version_tag(self._model, version, f"{_TAG}previous", state.current)
        self._client.set_registered_model_alias(self._model, CANDIDATE if wish.trial else CURRENT, version)

    # ---- roll back

    def rollback(self, who: str, reason: str, version: str | None, candidate: bool) -> str:
        with _explained(self._model):
            state = self._state()
            if candidate:
                if state.candidate is None:
                    raise ConfigError(f"mlflow://{self._model}: there is no candidate")
                self._note(state.candidate.version, "rolled back", who, reason or "by hand", False)
                self._client.delete_registered_model_alias(self._model, CANDIDATE)
                return f"{state.candidate.version} is rolled back; current is {state.current}"
            target = version or (state.previous[0] if state.previous else None)
            if state.current is None or target is None or target == state.current:
                raise ConfigError(f"mlflow://{self._model}: no other version to go back to; name one with --to")
            self._client.get_model_version(self._model, target)
            self._note(state.current, "rolled back", who, f"{reason or 'by hand'}; back to {target}", False)
            self._client.set_registered_model_alias(self._model, CURRENT, target)
            return f"{state.current} is rolled back; current is {target}"

    # ---- look

    def versions(self) -> list[dict[str, Any]]:
        with _explained(self._model):
            state = self._state()
            found = self._client.search_model_versions(f"name = '{self._model}'")
        rows = []
        for known in sorted(found, key=lambda one: int(one.version)):
            version = str(known.version)
            decided = json.loads(known.tags.get(f"{_TAG}decision", "{}"))
            aliases = {state.current: CURRENT, state.candidate.version if state.candidate else "": CANDIDATE}
            status = aliases.get(version) or ("refused" if decided.get("what") == "refused" else "")
            registered = datetime.fromtimestamp(known.creation_timestamp / 1000, UTC).isoformat(timespec="seconds")
            export = known.tags.get(f"{_TAG}export", "–")
            round_id = export.split("-")[0]
            rows.append(
                {
                    "version": version,
                    "name": self._model,
                    "round": round_id,
                    "registered": registered,
                    "by": decided.get("who", "–"),
                    "status": status,
                    "export": export,
                    "decision": decided,
                }
            )
        return rows

    def _state(self) -> State:
        models = self._client.search_registered_models(f"name = '{self._model}'")
        aliases = {name: str(version) for name, version in (models[0].aliases if models else {}).items()}
        current, candidate = aliases.get(CURRENT), aliases.get(CANDIDATE)
        previous: tuple[str, ...] = ()
        if current is not None:
            before = self._client.get_model_version(self._model, current).tags.get(f"{_TAG}previous")
            previous = (before,) if before else ()
        waits = None
        if candidate is not None:
            waits = Candidate(version=candidate, mode="wait", share=0.0, live=LiveGates(), since="")
        return State(current=current, candidate=waits, previous=previous)

    def _by_digest(self, staged: str) -> str | None:
        """The version that this very export has already."""
        found = self._client.search_model_versions(f"name = '{self._model}'")
        same = [str(known.version) for known in found if known.tags.get(f"{_TAG}export") == staged]
        return same[0] if same else None

    def _fetched(self, version: str, folder: Path) -> Path:
        folder.mkdir()
        where = self._client.get_model_version(self._model, version).run_id
        return Path(self._client.download_artifacts(where, _EXPORT, str(folder)))

    def _artifact(self, version: Any, name: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="fedppd-mlflow-") as temporary:
            return Path(self._client.download_artifacts(version.run_id, f"{_EXPORT}/{name}", temporary)).read_bytes()

    def _note(self, version: str, what: str, who: str, why: str, forced: bool) -> None:
        """The newest decision, before the alias moves. MLflow keeps one value of a tag, so each has its time, too."""
        at = now()
        decision = json.dumps({"time": at, "who": who, "what": what, "why": why, "forced": forced})
        for name in ("decision", f"decision.{at.replace(':', '').replace('+0000', 'Z')}"):
            self._client.set_model_version_tag(self._model, version, f"{_TAG}{name}", decision)


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """MLflow's own errors as one line."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        reason = " ".join(str(error).split())[:300]
        raise FedPPDError(f"mlflow://{model}: {reason}; check $MLFLOW_TRACKING_URI") from None
