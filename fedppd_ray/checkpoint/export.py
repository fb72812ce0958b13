"""The exported student: `student.safetensors` (named tensors) and `model.json` (all that serving needs).

Both files are replaced atomically, weights first. `model.json` carries the weights' sha256, so a reader that
comes between the two renames sees a mismatch and reads again.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from fedppd_ray.checkpoint.files import sha256, write_atomically, write_json
from fedppd_ray.checkpoint.remote import Location, is_url, read_file
from fedppd_ray.config import Config
from fedppd_ray.config_identity import config_hash
from fedppd_ray.errors import CheckpointError
from fedppd_ray.models.flat import FlatModel, Layout, Vector
from fedppd_ray.models.networks import NETWORKS, build_network

FORMAT = 1
WEIGHTS, CARD = "student.safetensors", "model.json"
# Seconds between readings, where the files are uploaded one after the other.
_UPLOAD_PAUSES = (0.2, 0.5, 1.0, 2.0)


def export_student(
    run: Path,
    config: Config,
    round_id: int,
    student: FlatModel,
    metrics: Mapping[str, float],
    abstention: Mapping[str, Any] | None,
) -> None:
    folder = run / "student"
    folder.mkdir(exist_ok=True)
    tensors = {name: array.copy() for name, array in student.layout.unpack(student.export()).items()}
    content = save_tensors(tensors)
    digest = sha256(content)
    info = config.dataset
    card = {
        "format": FORMAT,
        "name": config.name,
        "version": f"{round_id}-{digest[:12]}",
        "round": round_id,
        "method": config.method,
        "network": config.exported_network,
        "classes": list(info.classes),
        "input": {"channels": info.shape[0], "height": info.shape[1], "width": info.shape[2]},
        "normalisation": {"mean": list(info.mean), "std": list(info.std)},
        "metrics": dict(metrics),
        "abstention": abstention,
        "config_hash": config_hash(config),
        "sha256": digest,
    }
    write_atomically(folder / WEIGHTS, content)
    write_json(folder / CARD, card)


def read_card(run: Location) -> dict[str, Any]:
    path = f"{run}/student/{CARD}"
    try:
        card = json.loads(read_file(run, f"student/{CARD}"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); is {run} a finished run?") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a model card of format {FORMAT}")
    if card.get("network") not in NETWORKS:
        raise CheckpointError(f"{path}: unknown network {card.get('network')!r}; a newer version may know it")
    return card


def read_student(run: Location) -> tuple[dict[str, Any], FlatModel]:
    """The card and the loaded network, in evaluation mode. Refuses weights that are not the card's."""
    path = f"{run}/student/{WEIGHTS}"
    try:
        card, content = _read_pair(run)
        if sha256(content) != card["sha256"]:
            raise CheckpointError(f"{path}: does not match the sha256 in {CARD}")
        tensors = load_tensors(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    shape = (card["input"]["channels"], card["input"]["height"], card["input"]["width"])
    model = FlatModel(build_network(card["network"], shape, len(card["classes"])))
    model.load(_fitting(tensors, model.layout, path))
    model.module.eval()
    return card, model


def _read_pair(run: Location) -> tuple[dict[str, Any], bytes]:
    """Card and weights. Between the two uploads of an export they do not match for a while: then once more."""
    card, content = read_card(run), read_file(run, f"student/{WEIGHTS}")
    for pause in _UPLOAD_PAUSES if is_url(run) else ():
        if sha256(content) == card["sha256"]:
            break
        time.sleep(pause)
        card, content = read_card(run), read_file(run, f"student/{WEIGHTS}")
    return card, content


def _fitting(tensors: Mapping[str, Vector], layout: Layout, path: str) -> Vector:
    expected = {slot.name: slot.shape for slot in layout.slots}
    found = {name: array.shape for name, array in tensors.items()}
    if expected != found:
        wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        raise CheckpointError(f"{path}: tensors {wrong} do not fit the network of {CARD}")
    return layout.pack(tensors)
