"""A checkpoint: a folder with the state's vectors (safetensors) and a JSON manifest. No pickle.

checkpoints/round-000004/state.safetensors    one flat vector a role
checkpoints/round-000004/manifest.json        round, config hash, sha256 of the tensors, the round's record
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from fedppd_ray.checkpoint.files import sha256, write_atomically, write_json
from fedppd_ray.core.types import GlobalState
from fedppd_ray.errors import CheckpointError

FORMAT = 1


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
    content = save_tensors(dict(state.models))
    write_atomically(folder / "state.safetensors", content)
    manifest = Manifest(FORMAT, state.round, config_hash, dict(config), sha256(content), dict(record))
    write_json(folder / "manifest.json", asdict(manifest))


def read_manifest(folder: Path) -> Manifest:
    try:
        values = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest = Manifest(**values)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: unreadable manifest ({error})") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{folder}: checkpoint format {manifest.format}, this version reads {FORMAT}")
    return manifest


def read_state(folder: Path, manifest: Manifest) -> GlobalState:
    try:
        content = (folder / "state.safetensors").read_bytes()
        if sha256(content) != manifest.sha256:
            raise CheckpointError(f"{folder}: state.safetensors does not match its manifest; the file is damaged")
        return GlobalState(manifest.round, load_tensors(content))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: unreadable state ({error})") from None
