"""Prediction sets over HTTP: asked for by a confidence, the same whichever way they are asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from fedppd_ray.runs.export import load_student
from tests.service.conftest import Client, npy, png

NPY = {"Content-Type": "application/x-npy"}


def ask(client: TestClient, pixels: Any, **query: Any) -> dict[str, Any]:
    answer = client.post("/predict", params=query, content=npy(pixels), headers=NPY)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_set_comes_where_a_confidence_is_asked_for_and_only_there(client: TestClient, digits: Any) -> None:
    plain, asked = ask(client, digits.images[:3, 0]), ask(client, digits.images[:3, 0], confidence=0.9)
    assert "conformal" not in plain
    assert all("set" not in one for one in plain["predictions"])
    assert asked["conformal"] == {"method": "lac", "confidence": 0.9, "guarantee": "marginal", "rows": 400}
    for before, after in zip(plain["predictions"], asked["predictions"], strict=True):
        assert before["class_name"] in after["set"]
        assert before == {key: value for key, value in after.items() if key != "set"}


def test_sets_cover_held_out_digits_and_grow_with_confidence(client: TestClient, digits: Any) -> None:
    """1,000 rows: at 95 % the Beta-binomial of 400 calibration rows has less than one in a million below 90 %."""
    sizes = []
    for confidence in (0.8, 0.95, 0.99):
        answers = ask(client, digits.images[:, 0], confidence=confidence)["predictions"]
        held = [str(label) in one["set"] for one, label in zip(answers, digits.labels, strict=True)]
        assert np.mean(held) >= confidence - 0.05
        sizes.append(np.mean([len(one["set"]) for one in answers]))
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_json_query_image_and_open_inference_name_the_same_set(
    client: TestClient, digits_run: Path, digits: Any
) -> None:
    student = load_student(digits_run)
    doubtful = max(range(200), key=lambda row: student.predict(digits.images[row : row + 1])[0]["entropy"])
    pixels = digits.images[doubtful, 0]
    wanted = student.predict(digits.images[doubtful : doubtful + 1], confidence=0.99)[0]["set"]
    assert len(wanted) > 1
    body = {"instances": [pixels.tolist()], "confidence": 0.99}
    found = [
        client.post("/predict", json=body),
        client.post("/predict", json={**body, "instances": [pixels.tolist()] * 40}),  # decoded elsewhere
        client.post("/predict?confidence=0.99", content=png(pixels), headers={"Content-Type": "image/png"}),
    ]
    assert [answer.json()["predictions"][0]["set"] for answer in found] == [wanted] * 3
    name, tensor = client.get("/model").json()["name"], {"name": "image", "shape": [1, 28, 28], "datatype": "UINT8"}
    infer = {"inputs": [{**tensor, "data": pixels.ravel().tolist()}], "parameters": {"confidence": 0.99}}
    outputs = {one["name"]: one for one in client.post(f"/v2/models/{name}/infer", json=infer).json()["outputs"]}
    assert outputs["set"]["shape"] == [1, 10]
    assert outputs["set"]["datatype"] == "BOOL"
    assert [str(label) for label, inside in enumerate(outputs["set"]["data"]) if inside] == wanted
    del infer["parameters"]
    assert "set" not in {one["name"] for one in client.post(f"/v2/models/{name}/infer", json=infer).json()["outputs"]}
    named = client.post(f"/v2/models/{name}/infer", json={**infer, "outputs": [{"name": "set"}]}).json()["outputs"][0]
    own = student.predict(digits.images[doubtful : doubtful + 1], confidence=0.9)[0]["set"]  # the card's confidence
    assert [str(label) for label, inside in enumerate(named["data"]) if inside] == own


@pytest.mark.parametrize("confidence", [0, 1, -0.1, 1.5, "nan", "sure"])
def test_a_confidence_that_is_no_share_is_refused_by_name(client: TestClient, digits: Any, confidence: Any) -> None:
    answer = client.post("/predict", params={"confidence": confidence}, content=npy(digits.images[:1, 0]), headers=NPY)
    assert answer.status_code == 422
    assert "confidence" in answer.json()["error"]["field"]
    if not isinstance(confidence, str):
        body = {"instances": digits.images[:1, 0].tolist(), "confidence": confidence}
        assert client.post("/predict", json=body).json()["error"]["field"] == "confidence"


def test_a_query_that_contradicts_the_body_is_refused(client: TestClient, digits: Any) -> None:
    body = {"instances": digits.images[:1, 0].tolist(), "confidence": 0.9}
    assert client.post("/predict?confidence=0.9", json=body).status_code == 200
    refused = client.post("/predict?confidence=0.95", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"]["field"] == "confidence"


def test_a_student_without_calibration_rows_says_that_it_has_no_sets(open_client: Client, colour_run: Path) -> None:
    body = npy(np.zeros((1, 32, 32, 3), np.uint8))
    answer = open_client(colour_run).post("/predict?confidence=0.9", content=body, headers=NPY)
    assert answer.status_code == 422
    assert answer.json()["error"]["field"] == "confidence"
    assert "calibration" in answer.json()["error"]["message"]
    tensor = {"name": "image", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [0] * 3072}
    asked = {"inputs": [tensor], "outputs": [{"name": "set"}]}
    refused = open_client(colour_run).post("/v2/models/colours/infer", json=asked)
    assert refused.status_code == 422
    assert "calibration" in refused.json()["error"]
