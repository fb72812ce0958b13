"""What `/predict` answers, and that it is what `evaluate` computes."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from fedppd_ray.inference.temperature import scaled
from fedppd_ray.runs.run import evaluate_run
from tests.service.conftest import Client, npy, png

PNG, JPEG, NPY = ({"Content-Type": kind} for kind in ("image/png", "image/jpeg", "application/x-npy"))


def test_answer_has_the_promised_form(client: TestClient, digits: Any) -> None:
    answer = client.post("/predict", json={"instances": [digits.images[0][0].tolist()]}).json()
    assert answer["model"].keys() == {"name", "version", "round"}
    (prediction,) = answer["predictions"]
    told = ["label", "class_name", "probabilities", "entropy", "normalized_entropy", "abstain", "ood"]
    assert list(prediction) == told
    probabilities = np.array(prediction["probabilities"])
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert prediction["entropy"] == pytest.approx(-(probabilities * np.log(probabilities)).sum(), abs=1e-9)
    assert prediction["normalized_entropy"] == pytest.approx(prediction["entropy"] / math.log(10))
    assert prediction["class_name"] == str(prediction["label"])


@pytest.fixture(scope="module")
def evaluated(digits_run: Path) -> Any:
    """Probabilities of the held-out rows, as `fedppd evaluate` computes them, at the card's temperature."""
    seen = evaluate_run(digits_run)
    return np.exp(scaled(seen.log_probabilities, seen.figures["temperature"]))


@pytest.mark.parametrize("kind", ["json", "npy uint8", "npy float", "npy fortran", "png"])
def test_predict_equals_what_evaluate_computes(client: TestClient, evaluated: Any, digits: Any, kind: str) -> None:
    rows = np.arange(0, 500, 25)
    expected = evaluated[rows]
    images = np.array(digits.images[rows][:, 0])
    if kind == "json":
        answers = [client.post("/predict", json={"instances": images.tolist()})]
    elif kind == "png":
        answers = [client.post("/predict", content=png(image), headers=PNG) for image in images]
    else:
        array = {"npy uint8": images, "npy float": images.astype(float), "npy fortran": np.asfortranarray(images)}[kind]
        answers = [client.post("/predict", content=npy(array), headers=NPY)]
    found = [p["probabilities"] for answer in answers for p in answer.json()["predictions"]]
    # Float32 sums depend on the batch a row is in, in the last places.
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_digits_get_their_label_and_low_entropy(client: TestClient, digits: Any) -> None:
    answer = client.post("/predict", content=npy(np.array(digits.images[:, 0])), headers=NPY).json()["predictions"]
    right = np.array([p["label"] for p in answer]) == np.asarray(digits.labels)
    assert right.mean() > 0.9
    assert np.median([p["entropy"] for p in answer]) < 0.3
    # 5 % of calibration rows abstain; the held-out rows are 1,000 others: three standard errors of both samples.
    assert np.mean([p["abstain"] for p in answer]) == pytest.approx(
        0.05, abs=3 * math.sqrt(0.05 * 0.95 * (1 / 400 + 1 / 1000))
    )


def test_images_unlike_digits_abstain(client: TestClient, digits: Any) -> None:
    outside = evaluate_ood()
    answer = client.post("/predict", content=npy(outside), headers=NPY).json()["predictions"]
    inside = client.post("/predict", content=npy(np.array(digits.images[:, 0])), headers=NPY).json()["predictions"]
    assert np.mean([p["abstain"] for p in answer]) > 4 * np.mean([p["abstain"] for p in inside])
    noise = np.full((1, 28, 28), 127, np.uint8)
    assert client.post("/predict", content=npy(noise), headers=NPY).json()["predictions"][0]["abstain"]


def evaluate_ood() -> Any:
    from fedppd_ray.data.catalog import CATALOG
    from fedppd_ray.data.datasets import load_ood

    return np.array(load_ood("glyphs", CATALOG["mnist5k"], rows=300)[:, 0])


def test_less_coverage_abstains_more(client: TestClient, digits: Any) -> None:
    body = npy(np.array(digits.images[:, 0]))
    shares = []
    for coverage in (0.5, 0.8, 0.95, 1.0):
        answer = client.post(f"/predict?coverage={coverage}", content=body, headers=NPY).json()
        assert answer["abstention"]["coverage"] == coverage
        shares.append(np.mean([not p["abstain"] for p in answer["predictions"]]))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert shares[0] == pytest.approx(0.5, abs=0.1)


def test_coverage_between_two_levels_answers_at_least_that_share(client: TestClient, digits: Any) -> None:
    image = digits.images[0][0].tolist()
    answer = client.post("/predict", json={"instances": [image], "coverage": 0.81}).json()
    assert answer["abstention"]["coverage"] == 0.85


def test_a_jpeg_of_another_size_is_fitted_to_the_model(client: TestClient, digits: Any) -> None:
    index = int(np.flatnonzero(np.asarray(digits.labels) == 7)[3])
    large = np.kron(digits.images[index][0], np.ones((8, 8)))
    answer = client.post("/predict", content=png(large, "JPEG"), headers=JPEG)
    assert answer.json()["predictions"][0]["label"] == 7


def test_colour_model_takes_colour_and_says_when_it_cannot_abstain(open_client: Client, colour_run: Path) -> None:
    client = open_client(colour_run)
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    by_json = client.post("/predict", json={"instances": [image.tolist()]}).json()
    by_npy = client.post("/predict", content=npy(image[None]), headers=NPY).json()
    by_png = client.post("/predict", content=png(image), headers=PNG).json()
    assert by_json == by_npy == by_png
    assert by_json["abstention"] is None
    assert by_json["predictions"][0]["abstain"] is False
    refused = client.post("/predict?coverage=0.9", content=npy(image[None]), headers=NPY)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "coverage")
    grey = client.post("/predict", json={"instances": [image[:, :, 0].tolist()]})
    assert (grey.status_code, grey.json()["error"]["field"]) == (422, "instances[0][0][0]")


def test_model_card_tells_what_is_served(client: TestClient) -> None:
    card = client.get("/model").json()
    assert card["classes"] == list("0123456789")
    assert card["input"] == {"channels": 1, "height": 28, "width": 28}
    assert card["abstention"]["table"]
    assert len(card["config_hash"]) == 64
    assert card["reload"] == {
        "watching": False,
        "loaded_at": card["reload"]["loaded_at"],
        "reloads": 0,
        "refused": 0,
        "error": None,
    }


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2", "/docs", "/", "/openapi.json"]
)
def test_it_is_alive_and_documented(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    # Nothing is fetched from elsewhere: the service works without the internet.
    assert "//cdn" not in answer.text


def test_metrics_count_requests_entropies_and_abstentions(open_client: Client, digits_run: Path, digits: Any) -> None:
    client = open_client(digits_run)
    client.post("/predict", content=npy(np.array(digits.images[:40, 0])), headers=NPY)
    client.post("/predict", content=npy(np.full((3, 28, 28), 127, np.uint8)), headers=NPY)
    client.post("/predict", content=b"", headers=NPY)
    client.get("/no-such-page-1")
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert lines['fedppd_requests_total{route="/predict",status="200"}'] == "2.0"
    assert lines['fedppd_requests_total{route="/predict",status="400"}'] == "1.0"
    assert lines['fedppd_requests_total{route="other",status="404"}'] == "1.0"
    assert lines["fedppd_request_seconds_count"] == "3.0"
    assert lines["fedppd_batch_rows_sum"] == "43.0"
    assert lines["fedppd_entropy_nats_count"] == "43.0"
    assert float(lines['fedppd_predictions_total{abstain="true"}']) >= 3
    assert lines["fedppd_model_round"] == "1.0"


def digit_of(digits: Any, label: int) -> Any:
    return np.array(digits.images[int(np.flatnonzero(np.asarray(digits.labels) == label)[3])][0])


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


def test_16_bits_of_grey_are_the_same_picture(client: TestClient, digits: Any) -> None:
    """They used to be cut off at 255, which leaves black and white."""
    eight = digit_of(digits, 7)
    sixteen = Image.fromarray(eight.astype(np.uint16) * 257)
    found = client.post("/predict", content=encoded(sixteen), headers=PNG).json()["predictions"]
    assert found == client.post("/predict", content=png(eight), headers=PNG).json()["predictions"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_camera_held_sideways_shows_the_same_picture(client: TestClient, digits: Any, kind: str) -> None:
    upright = np.kron(digit_of(digits, 7), np.ones((4, 4), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    turned = encoded(Image.fromarray(np.rot90(upright).copy()), kind, exif=exif)
    content_type = {"Content-Type": f"image/{kind.lower()}"}
    assert client.post("/predict", content=turned, headers=content_type).json()["predictions"][0]["label"] == 7


def test_opaque_alpha_is_dropped_and_transparency_refused_by_name(client: TestClient, digits: Any) -> None:
    grey = digit_of(digits, 3)
    opaque = Image.merge("LA", [Image.fromarray(grey), Image.new("L", (28, 28), 255)])
    found = client.post("/predict", content=encoded(opaque), headers=PNG).json()["predictions"]
    assert found == client.post("/predict", content=png(grey), headers=PNG).json()["predictions"]
    clear = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(grey)])
    refused = client.post("/predict", content=encoded(clear), headers=PNG)
    assert refused.status_code == 422
    assert "transparent" in refused.json()["error"]["message"]


def test_floats_of_0_to_1_get_a_hint(client: TestClient, digits: Any) -> None:
    scaled = digit_of(digits, 7)[None] / 255
    tensor = {"name": "image", "shape": [1, 28, 28], "datatype": "FP32", "data": scaled.ravel().tolist()}
    by_json = client.post("/predict", json={"instances": scaled.tolist()}).json()["hint"]
    by_npy = client.post("/predict", content=npy(scaled), headers=NPY).json()["hint"]
    many = client.post("/predict", json={"instances": np.repeat(scaled, 40, 0).tolist()}).json()["hint"]
    by_tensor = client.post("/v2/models/digits/infer", json={"inputs": [tensor]}).json()["parameters"]["hint"]
    assert by_json == by_npy == many == by_tensor
    assert "255" in by_json
    for sound in (255 * scaled, np.zeros((1, 28, 28))):
        assert "hint" not in client.post("/predict", content=npy(sound), headers=NPY).json()


def test_every_reference_of_the_openapi_document_resolves(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    references: list[str] = []

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            references.extend(value for key, value in node.items() if key == "$ref")
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            collect(child)

    collect(document)
    assert len(references) > 5
    for reference in references:
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


def test_answers_of_many_images_are_one_document(client: TestClient, digits: Any) -> None:
    """They are written in pieces."""
    rows = np.array(digits.images[:500, 0])
    together = client.post("/predict", content=npy(rows), headers=NPY).json()["predictions"]
    tensor = {"name": "image", "shape": list(rows.shape), "datatype": "UINT8", "data": rows.ravel().tolist()}
    answer = client.post("/v2/models/digits/infer", json={"id": "x", "inputs": [tensor]}).json()
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert answer["id"] == "x"
    assert outputs["label"]["data"] == [prediction["label"] for prediction in together]
    assert outputs["probabilities"]["shape"] == [500, 10]
    flat = [share for prediction in together for share in prediction["probabilities"]]
    np.testing.assert_allclose(outputs["probabilities"]["data"], flat, atol=1e-6)
