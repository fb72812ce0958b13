"""The exported student: its weights (named tensors) and its model card (all that serving needs besides).

Both files are replaced atomically, weights first. The card carries the weights' sha256, so a reader that
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

from fedppd_ray.config.identity import config_hash
from fedppd_ray.config.nouns import NETWORKS, DatasetInfo
from fedppd_ray.config.own_networks import is_own, open_network
from fedppd_ray.config.schema import Config
from fedppd_ray.data.parts import BYTES
from fedppd_ray.errors import CheckpointError
from fedppd_ray.inference.card import checked_card
from fedppd_ray.inference.student import Student, input_shape
from fedppd_ray.methods import method_class
from fedppd_ray.models.flat import FlatModel, Layout, Vector
from fedppd_ray.models.networks import build_network
from fedppd_ray.runs.files import make_folder, sha256, write_atomically, write_json
from fedppd_ray.runs.layout import CARD, STUDENT, WEIGHTS, student_file
from fedppd_ray.runs.remote import Location, is_url, read_file
from fedppd_ray.runs.signature import require_trusted, trusted_key

FORMAT = 1
# Seconds between readings, where the files are uploaded one after the other.
_UPLOAD_PAUSES = (0.2, 0.5, 1.0, 2.0)


def export_student(
    run: Path,
    config: Config,
    round_id: int,
    student: FlatModel,
    metrics: Mapping[str, float],
    abstention: Mapping[str, Any] | None,
    calibration: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the card. `calibration`: what else calibration rows decided, the temperature above all."""
    folder = run / STUDENT
    make_folder(folder)
    tensors = {name: array.copy() for name, array in student.layout.unpack(student.export()).items()}
    content = save_tensors(tensors)
    digest = sha256(content)
    info = config.dataset
    card: dict[str, Any] = {
        "format": FORMAT,
        "name": config.name,
        "version": f"{round_id}-{digest[:12]}",
        "round": round_id,
        "method": config.method,
        **_network(config),
        "classes": list(info.classes),
        **_input(info),
        "metrics": dict(metrics),
        **(calibration or {"temperature": 1.0}),
        "abstention": abstention,
        "config_hash": config_hash(config),
        "sha256": digest,
    }
    write_atomically(folder / WEIGHTS, content)
    write_json(folder / CARD, card)
    return card


def _input(info: DatasetInfo) -> dict[str, Any]:
    """What the network takes, and how rows become that."""
    if info.table is not None:
        return {"input": {"numbers": info.shape[0]}, "table": info.table.model_dump(mode="json")}
    channels, height, width = info.shape
    normalisation: dict[str, Any] = {"mean": list(info.mean), "std": list(info.std)}
    if info.range != BYTES:
        normalisation["range"] = list(info.range)
    return {"input": {"channels": channels, "height": height, "width": width}, "normalisation": normalisation}


def _network(config: Config) -> dict[str, Any]:
    """Which network it is, and what its constructor needs; the source's digest where it is a user's own."""
    method = method_class(config)
    choice = method.networks(config)[method.exported_role(config)]
    described: dict[str, Any] = {"network": method.exported_network(config)}
    if choice.network_args:
        described["network_args"] = dict(choice.network_args)
    if choice.network_source is not None:
        described["network_source"] = choice.network_source
    return described


def read_card(run: Location, vouched: bool = True) -> dict[str, Any]:
    """`vouched`: where a trusted key is set, it must have signed the card; whoever is about to sign needs none."""
    path = f"{run}/{student_file(CARD)}"
    try:
        content = read_file(run, student_file(CARD))
        card = json.loads(content)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); is {run} a finished run?") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a model card of format {FORMAT}")
    if vouched:
        require_trusted(run, content, trusted_key())
    card = checked_card(card, path)  # before it is believed: a network of one's own is code that is imported
    if is_own(card["network"]):
        open_network(card["network"], card.get("network_source"), path)
    if card["network"] not in NETWORKS:
        raise CheckpointError(f"{path}: unknown network {card['network']!r}; a newer version may know it")
    return card


def read_student(run: Location) -> tuple[dict[str, Any], FlatModel]:
    """The card and the loaded network, in evaluation mode. Refuses weights that are not the card's."""
    path = f"{run}/{student_file(WEIGHTS)}"
    try:
        card, content = _read_pair(run)
        if sha256(content) != card["sha256"]:
            raise CheckpointError(f"{path}: does not match the sha256 in {CARD}")
        tensors = load_tensors(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    model = FlatModel(build_network(card["network"], input_shape(card), len(card["classes"]), card.get("network_args")))
    model.load(_fitting(tensors, model.layout, path))
    model.module.eval()
    return card, model


def load_student(run: Location) -> Student:
    """The exported student of a run, ready to predict."""
    return Student(*read_student(run))


def _read_pair(run: Location) -> tuple[dict[str, Any], bytes]:
    """Card and weights. Between the two uploads of an export they do not match for a while: then once more."""
    card, content = read_card(run), read_file(run, student_file(WEIGHTS))
    for pause in _UPLOAD_PAUSES if is_url(run) else ():
        if sha256(content) == card["sha256"]:
            break
        time.sleep(pause)
        card, content = read_card(run), read_file(run, student_file(WEIGHTS))
    return card, content


def _fitting(tensors: Mapping[str, Vector], layout: Layout, path: str) -> Vector:
    expected = {slot.name: slot.shape for slot in layout.slots}
    found = {name: array.shape for name, array in tensors.items()}
    if expected != found:
        wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        raise CheckpointError(f"{path}: tensors {wrong} do not fit the network of {CARD}")
    return layout.pack(tensors)
