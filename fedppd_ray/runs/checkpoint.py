"""A checkpoint: a folder with the state's vectors (safetensors) and a JSON manifest. No pickle.

The state is one flat vector per role, and what the server keeps for itself; the manifest has the round, the config's
hash, the sha256 of the tensors and the round's record. `layout` has their names.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from fedppd_ray.errors import CheckpointError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.runs.files import sha256, write_atomically, write_json
from fedppd_ray.runs.layout import MANIFEST, STATE

FORMAT = 1
_KEPT = "server/"  # before the names of what the server keeps for itself


@dataclass(frozen=True)
class Manifest:
    format: int
    round: int
    config_hash: str
    config: Mapping[str, Any]  # the keys that a resumed run must share, for a readable difference
    sha256: str
    record: Mapping[str, Any]  # the round's line of metrics.jsonl


def write_checkpoint(
    folder: Path, state: GlobalState, config_hash: str, config: Mapping[str, Any], record: Mapping[str, Any]
) -> None:
    """Fill an empty folder."""
    content = save_tensors({**state.models, **{f"{_KEPT}{name}": vector for name, vector in state.kept.items()}})
    write_atomically(folder / STATE, content)
    manifest = Manifest(FORMAT, state.round, config_hash, dict(config), sha256(content), dict(record))
    write_json(folder / MANIFEST, asdict(manifest))


def read_manifest(folder: Path) -> Manifest:
    try:
        values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        manifest = Manifest(**values)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: unreadable manifest ({error})") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{folder}: checkpoint format {manifest.format}, this version reads {FORMAT}")
    return manifest


def read_state(folder: Path, manifest: Manifest) -> GlobalState:
    try:
        content = (folder / STATE).read_bytes()
        if sha256(content) != manifest.sha256:
            raise CheckpointError(f"{folder}: {STATE} does not match its manifest; the file is damaged")
        tensors = load_tensors(content)
        models = {name: vector for name, vector in tensors.items() if not name.startswith(_KEPT)}
        kept = {name.removeprefix(_KEPT): vector for name, vector in tensors.items() if name.startswith(_KEPT)}
        return GlobalState(manifest.round, models, kept)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: unreadable state ({error})") from None
