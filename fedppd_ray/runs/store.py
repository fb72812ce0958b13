"""The run folder: its config, one line of metrics a round, and the newest checkpoints."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fedppd_ray.config.file import Overrides, load_stored
from fedppd_ray.config.identity import binding, config_hash, conflicts
from fedppd_ray.config.schema import Config
from fedppd_ray.errors import CheckpointError
from fedppd_ray.federation.types import ClientInfo, GlobalState
from fedppd_ray.runs.checkpoint import Manifest, read_manifest, read_state, write_checkpoint
from fedppd_ray.runs.files import make_folder, sync_folder, write_atomically, write_json
from fedppd_ray.runs.layout import (
    ANY_CHECKPOINT,
    CARD,
    CHECKPOINTS,
    CLIENT_FIGURES,
    CLIENTS,
    CONFIG,
    MANIFEST,
    METRICS,
    SIGNATURE,
    SITE_FIGURES,
    STATE,
    UNFINISHED,
    WEIGHTS,
    checkpoint_of,
    student_file,
)
from fedppd_ray.runs.lock import locked
from fedppd_ray.runs.remote import Mirror

log = logging.getLogger(__name__)


class RunStore:
    """Reads and writes one run folder, and keeps its mirror (if it has one) up to date. One writer at a time."""

    def __init__(self, folder: Path, mirror: Mirror | None = None) -> None:
        self.folder = folder
        self._mirror = mirror
        self._name = mirror.url if mirror else str(folder)  # what users call it
        self._checkpoints = folder / CHECKPOINTS
        self._metrics = folder / METRICS

    def exists(self) -> bool:
        return (self.folder / CONFIG).exists()

    def require_run(self) -> None:
        if not self.exists():
            raise CheckpointError(f"{self._name} holds no run to resume; leave --resume out to start one")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """This process alone writes here. At a URL nobody is kept out: object storage has no locks."""
        if self._mirror:
            yield
            return
        try:
            make_folder(self.folder)
        except OSError as error:
            raise CheckpointError(f"{self._name} cannot be made ({error.strerror}); choose another --out") from None
        with locked(self.folder):
            yield

    def has_rounds(self) -> bool:
        """Whether anything was computed that another configuration would contradict."""
        return self._has_checkpoints() or bool(self.history())

    def _has_checkpoints(self) -> bool:
        # One without a manifest was never finished.
        return any((folder / MANIFEST).exists() for folder in self._folders())

    # ---- start

    def create(self, config: Config) -> None:
        """A new run. Refuses to write over an old one."""
        if self.exists():
            raise CheckpointError(
                f"{self._name} already holds a run; continue it with --resume or choose another --out"
            )
        try:
            make_folder(self._checkpoints)
        except OSError as error:
            raise CheckpointError(f"{self._name} cannot be made ({error.strerror}); choose another --out") from None
        self._write_config(config)
        self._push(CONFIG)

    def resume(self, config: Config) -> GlobalState | None:
        """The newest sound state, or None if no round was finished; metrics are cut back to match."""
        self.require_run()
        self._require_same(config)
        make_folder(self._checkpoints)
        for leftover in self._checkpoints.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover)
        found = self._newest_sound()
        if found is None and self.has_rounds():
            reason = "every checkpoint is damaged" if self._has_checkpoints() else "its checkpoints are gone"
            raise CheckpointError(
                f"{self._name}: {reason}; remove its {CHECKPOINTS}/ and {METRICS} to start again from round 1, or "
                f"choose another --out"
            )
        self._write_config(config)
        if found is None:
            self._rewrite_metrics([])
            self._push(CONFIG, METRICS)
            return None
        state, manifest = found
        if state.round > config.federation.rounds:
            raise CheckpointError(
                f"federation.rounds: {self._name} is at round {state.round} already, past "
                f"{config.federation.rounds}; ask for as many or more, or choose another --out"
            )
        kept = [line for line in self.history() if line["round"] < state.round]
        self._rewrite_metrics([*kept, manifest.record])
        self._push(CONFIG, METRICS)
        return state

    def config(self, overrides: Overrides = ()) -> Config:
        """As it was stored, or with some of its keys changed."""
        if not self.exists():
            raise CheckpointError(f"{self._name} is no run folder: it has no {CONFIG}")
        return load_stored(self.folder / CONFIG, overrides)

    def _write_config(self, config: Config) -> None:
        text = yaml.safe_dump(config.values(), sort_keys=False)
        write_atomically(self.folder / CONFIG, text.encode())

    def _require_same(self, config: Config) -> None:
        if not self.has_rounds():
            return  # it failed before its first round, perhaps by the very setting that is mended now
        before = self.config()
        if lines := "; ".join(conflicts(before, config)):
            raise CheckpointError(
                f"{self._name} was started with another config ({lines}); use its own, or a new --out"
            )

    # ---- rounds

    def save(self, state: GlobalState, config: Config, record: Mapping[str, Any]) -> None:
        """Persist a round: the new checkpoint is complete on disk before an old one goes."""
        final = self._folder_of(state.round)
        temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._checkpoints))
        try:
            write_checkpoint(temporary, state, config_hash(config), binding(config), record)
            if final.exists():  # a damaged one of an earlier attempt: resuming went behind it
                shutil.rmtree(final)
            temporary.rename(final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"round {state.round} could not be saved to {self._name} ({error.strerror}); the last saved round "
                f"is intact: make room, then continue with --resume"
            ) from error
        sync_folder(self._checkpoints)
        self._append_metrics(record)
        self._push_round(state.round)
        # What lies beyond this round is damaged: resuming went behind it. It must not take a sound one's place.
        beyond = [folder for folder in self._folders() if folder.name > final.name]
        upto = [folder for folder in self._folders() if folder.name <= final.name]
        surplus = [*beyond, *upto[: -config.checkpoint.keep]]
        if config.evaluation.export == "best" and (best := self.best_round()):
            surplus = [folder for folder in surplus if folder != self._folder_of(best)]
        for old in surplus:
            shutil.rmtree(old)
        self._remove_remote(surplus)

    def _append_metrics(self, record: Mapping[str, Any]) -> None:
        # The manifest holds this record too, so a torn line costs nothing: resuming writes it anew.
        new = not self._metrics.exists()
        with self._metrics.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        if new:
            sync_folder(self.folder)

    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a torn last line is left out."""
        if not self._metrics.exists():
            return []
        lines = []
        for line in self._metrics.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                log.warning("%s: left out a torn line", self._metrics)
        return lines

    def _rewrite_metrics(self, records: list[Mapping[str, Any]]) -> None:
        write_atomically(self._metrics, "".join(json.dumps(record) + "\n" for record in records).encode())

    # ---- clients

    def save_clients(self, clients: Sequence[ClientInfo]) -> None:
        """Keep the clients' counts beside the run, so that a report can be made without them."""
        write_json(self.folder / CLIENTS, {"clients": [asdict(info) for info in clients]})

    def has_clients(self) -> bool:
        return (self.folder / CLIENTS).exists()

    def clients(self) -> list[ClientInfo]:
        path = self.folder / CLIENTS
        try:
            values = json.loads(path.read_text(encoding="utf-8"))["clients"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); resume the run to mend it") from None
        return [
            ClientInfo(value["client"], value["rows"], tuple(value["class_counts"]), tuple(value.get("holds", ())))
            for value in values
        ]

    def save_client_figures(self, round_id: int, figures: Mapping[str, Any]) -> None:
        """What clients say of the student of this round, on rows that they keep back."""
        write_json(self.folder / CLIENT_FIGURES, {"round": round_id, **figures})

    def client_figures(self, round_id: int) -> dict[str, Any]:
        """Of the student of this round; {} where nothing is known."""
        try:
            found = dict(json.loads((self.folder / CLIENT_FIGURES).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}
        return found if found.pop("round", None) == round_id else {}

    # ---- mirror

    def _push(self, *names: str) -> None:
        if self._mirror:
            self._mirror.push(self.folder, names)

    def _push_round(self, round_id: int) -> None:
        """The order is the commit: what a manifest or a card vouches for lies there before it does.

        The student comes before the checkpoint, as it does on disk: resuming after a last round that is saved
        would export nothing.
        """
        checkpoint = f"{CHECKPOINTS}/{checkpoint_of(round_id)}"
        student = (student_file(WEIGHTS), student_file(SIGNATURE), student_file(CARD), SITE_FIGURES, CLIENT_FIGURES)
        state = (f"{checkpoint}/{STATE}", f"{checkpoint}/{MANIFEST}")
        try:
            self._push(CLIENTS, *student, *state, METRICS)
        except CheckpointError as error:
            raise CheckpointError(
                f"round {round_id} could not be saved ({error}); the last saved round is intact: once the "
                f"storage answers again, continue with --resume"
            ) from error

    def _remove_remote(self, checkpoints: list[Path]) -> None:
        """Manifests first: half a checkpoint must not look like a whole one."""
        if not self._mirror:
            return
        files = (MANIFEST, STATE)
        try:
            self._mirror.remove(f"{CHECKPOINTS}/{folder.name}/{file}" for folder in checkpoints for file in files)
        except CheckpointError as error:
            log.warning("an old checkpoint stays, which costs space and nothing else: %s", error)

    # ---- reading

    def latest(self) -> GlobalState:
        found = self._newest_sound()
        if found is None:
            raise CheckpointError(f"{self._name} holds no finished round")
        return found[0]

    def best_round(self) -> int | None:
        """The round of the lowest NLL on calibration rows, of those that were evaluated; None where none was."""
        known = [(line["calibration_nll"], line["round"]) for line in self.history() if "calibration_nll" in line]
        return min(known)[1] if known else None

    def best(self) -> GlobalState:
        """The state of that round, which `evaluation.export: best` keeps."""
        best = self.best_round()
        if best is None or not (self._folder_of(best) / MANIFEST).exists():
            raise CheckpointError(
                f"{self._name}: the checkpoint of its best round was not kept; train it in another --out with "
                f"evaluation.export=best"
            )
        return read_state(self._folder_of(best), read_manifest(self._folder_of(best)))

    def _newest_sound(self) -> tuple[GlobalState, Manifest] | None:
        for folder in reversed(self._folders()):
            try:
                manifest = read_manifest(folder)
                return read_state(folder, manifest), manifest
            except CheckpointError as error:
                log.warning("%s; trying the one before", error)
        return None

    def _folder_of(self, round_id: int) -> Path:
        return self._checkpoints / checkpoint_of(round_id)

    def _folders(self) -> list[Path]:
        return sorted(self._checkpoints.glob(ANY_CHECKPOINT))
