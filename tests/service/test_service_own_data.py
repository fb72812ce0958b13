"""The service takes what the model takes: images of any size, channels and range, and rows of a table."""

import csv
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from fedppd_ray.runs.run import Run
from serve.app import create_app
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from tests.service.conftest import npy
from tests.service.exports import COLUMNS, untrained_scans, untrained_table

RANDOM = np.random.default_rng(0)
SCAN = RANDOM.integers(0, 65_536, (18, 20), dtype=np.uint16)


def opened(run: Path) -> Iterator[TestClient]:
    settings = Settings(run=str(run))
    with TestClient(create_app(Predictor(settings, Metrics()), settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("own data")
    untrained_scans(home / "words", (1, 18, 20), (0.0, 65_535.0))
    untrained_scans(home / "floats", (4, 9, 7), (-1024.0, 3071.0))
    untrained_table(home / "table")
    return home


@pytest.fixture(scope="module")
def words(home: Path) -> Iterator[TestClient]:
    yield from opened(home / "words")


@pytest.fixture(scope="module")
def floats(home: Path) -> Iterator[TestClient]:
    yield from opened(home / "floats")


@pytest.fixture(scope="module")
def table(home: Path) -> Iterator[TestClient]:
    yield from opened(home / "table")


def post(client: TestClient, content: bytes, kind: str) -> Any:
    return client.post("/predict", content=content, headers={"Content-Type": kind})


def saved(pixels: Any, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format=kind, **options)
    return stream.getvalue()


# ---- images


def test_sixteen_bits_are_answered_as_predict_does_whatever_they_come_as(
    words: TestClient, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.png").write_bytes(saved(SCAN, "PNG"))
    expected = Run(home / "words").predict([tmp_path / "x.png"])[0]["probabilities"]
    tensor = {"name": "image", "shape": [1, 18, 20], "datatype": "UINT16", "data": SCAN.ravel().tolist()}
    large = np.repeat(SCAN[None], 20, 0).tolist()  # decoded elsewhere
    found = [
        post(words, saved(SCAN, "PNG"), "image/png").json()["predictions"][0]["probabilities"],
        post(words, saved(SCAN, "TIFF"), "image/tiff").json()["predictions"][0]["probabilities"],
        post(words, npy(SCAN[None]), "application/x-npy").json()["predictions"][0]["probabilities"],
        words.post("/predict", json={"instances": [SCAN.tolist()]}).json()["predictions"][0]["probabilities"],
        words.post("/predict", json={"instances": large}).json()["predictions"][7]["probabilities"],
        words.post("/v2/models/scans/infer", json={"inputs": [tensor]}).json()["outputs"][2]["data"],
    ]
    np.testing.assert_allclose(found, [expected] * len(found), atol=2e-6)
    assert len({round(p, 5) for p in expected}) == 2  # the scan is not all the network's bias


def test_sixteen_bits_are_the_cards_and_eight_bits_are_refused_or_hinted_at(words: TestClient) -> None:
    assert words.get("/model").json()["normalisation"]["range"] == [0, 65_535]
    (described,) = words.get("/v2/models/scans").json()["inputs"]
    assert described["parameters"] == {"range": [0, 65_535]}
    small = (SCAN // 256).astype(np.uint8)
    refused = post(words, saved(small, "PNG"), "image/png")
    assert refused.status_code == 422
    assert refused.json()["error"]["message"].startswith("pixels are of 8 bits, and the model's are of 16 bits")
    assert "multiply them by 257" in post(words, npy(small[None]), "application/x-npy").json()["hint"]
    assert "multiply them by 65535" in post(words, npy(small[None] / 255), "application/x-npy").json()["hint"]
    assert "hint" not in post(words, npy(SCAN[None]), "application/x-npy").json()
    beyond = post(words, npy(np.full((1, 18, 20), 65_536.0)), "application/x-npy").json()["error"]
    assert beyond["message"].endswith("they must be within 0–65535")


def test_floats_of_four_channels_are_taken_in_the_cards_range(floats: TestClient, home: Path, tmp_path: Path) -> None:
    scan = RANDOM.uniform(-1024, 3071, (9, 7, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", scan)
    expected = Run(home / "floats").predict([tmp_path / "x.npy"])[0]["probabilities"]
    by_npy = post(floats, npy(scan[None]), "application/x-npy").json()
    by_json = floats.post("/predict", json={"instances": [scan.tolist()]}).json()
    for answer in (by_npy, by_json):
        assert "hint" not in answer
        assert answer["predictions"][0]["probabilities"] == pytest.approx(expected, abs=2e-6)
    refused = floats.post("/predict", json={"instances": [(scan - 5000).tolist()]})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "instances[0][0][0][0]")


def test_a_page_too_many_a_broken_file_and_a_table_for_an_image_model_are_refused(words: TestClient) -> None:
    pages = [Image.fromarray(SCAN) for _ in range(2)]
    stream = io.BytesIO()
    pages[0].save(stream, format="TIFF", save_all=True, append_images=pages[1:])
    refused = post(words, stream.getvalue(), "image/tiff")
    assert (refused.status_code, "2 pages" in refused.json()["error"]["message"]) == (422, True)
    assert post(words, saved(SCAN, "TIFF")[:200], "image/tiff").status_code == 400
    assert post(words, b"no DICOM", "application/dicom").status_code == 422
    wrong = post(words, b"age\n3\n", "text/csv")
    assert (wrong.status_code, "this model takes images" in wrong.json()["error"]["message"]) == (415, True)


def test_a_large_tiff_is_not_decoded(home: Path) -> None:
    settings = Settings(run=str(home / "words"), max_pixels=359)
    with TestClient(create_app(Predictor(settings, Metrics()), settings)) as client:
        assert post(client, saved(SCAN, "TIFF"), "image/tiff").status_code == 413


# ---- tables

ROWS: list[dict[str, Any]] = [
    {"age": 71.5, "ward": "b, c", "lab": None, "outcome": "not read"},
    {"age": 130, "ward": "z", "lab": 5.25},
    {"age": 40, "ward": "a", "lab": 3},
]
NAMES = [str(column["name"]) for column in COLUMNS]


def as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*NAMES, "outcome"])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@pytest.fixture(scope="module")
def expected(home: Path) -> list[dict[str, Any]]:
    """What `fedppd predict` says."""
    (home / "rows.csv").write_text(as_csv(ROWS))
    return Run(home / "table").predict([home / "rows.csv"])


def columns_as_tensors() -> list[dict[str, Any]]:
    data = {name: [row[name] for row in ROWS] for name in NAMES}
    kinds = {"age": "FP64", "ward": "BYTES", "lab": "FP32"}
    return [{"name": name, "datatype": kinds[name], "shape": [3], "data": data[name]} for name in reversed(NAMES)]


def test_rows_are_answered_as_predict_does_by_name_in_order_and_as_csv(
    table: TestClient, expected: list[dict[str, Any]]
) -> None:
    answers = [
        table.post("/predict", json={"instances": ROWS}),
        table.post("/predict", json={"instances": [[row[name] for name in NAMES] for row in ROWS]}),
        post(table, as_csv(ROWS).encode("utf-8-sig"), "text/csv"),
        table.post("/predict", json={"instances": ROWS * 500}),  # by the patient decoders
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        for found, row in zip(answer.json()["predictions"], expected, strict=False):
            assert found["probabilities"] == pytest.approx(row["probabilities"], abs=2e-6)
            assert found["outside"] == row["outside"]
    assert [row["outside"] for row in expected] == [[], ["age", "ward"], []]


def test_v2_describes_the_columns_and_takes_a_tensor_for_each(
    table: TestClient, expected: list[dict[str, Any]]
) -> None:
    described = table.get("/v2/models/patients").json()
    assert [(one["name"], one["datatype"]) for one in described["inputs"]] == [
        ("age", "FP64"), ("ward", "BYTES"), ("lab", "FP64"),
    ]  # fmt: skip
    assert described["inputs"][0]["parameters"]["high"] == 95
    assert described["inputs"][1]["parameters"]["categories"] == ["a", "b, c"]
    answer = table.post("/v2/models/patients/infer", json={"inputs": columns_as_tensors()}).json()
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs["probabilities"] == pytest.approx([p for row in expected for p in row["probabilities"]], abs=2e-6)
    assert outputs["outside"] == ["", "age;ward", ""]


def test_v2_takes_columns_as_binary_tensors(table: TestClient) -> None:
    tensors = columns_as_tensors()
    by_json = table.post("/v2/models/patients/infer", json={"inputs": tensors}).json()
    parts = []
    for tensor in tensors:
        values = tensor.pop("data")
        if tensor["datatype"] == "BYTES":
            parts.append(b"".join(struct.pack("<I", len(text)) + text.encode() for text in values))
        else:
            kind = {"FP64": "<f8", "FP32": "<f4"}[tensor["datatype"]]
            parts.append(np.array([np.nan if value is None else value for value in values], kind).tobytes())
        tensor["parameters"] = {"binary_data_size": len(parts[-1])}
    head = json.dumps({"inputs": tensors}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = table.post("/v2/models/patients/infer", content=b"".join([head, *parts]), headers=headers)
    assert answer.json() == by_json
    cut = table.post("/v2/models/patients/infer", content=b"".join([head, *parts])[:-1], headers=headers)
    assert cut.status_code == 422


@pytest.mark.parametrize(
    ("instances", "field", "says"),
    [
        ([{"age": 3, "ward": "a"}], "instances[0]", "column 'lab' is missing; give null"),
        ([[1, "a"]], "instances[0]", "has 2 values; this model takes 3"),
        ([{**ROWS[0], "age": "old"}], "instances", "row 1, column 'age': 'old' is not a number"),
        ([ROWS[0], {**ROWS[0], "age": True}], "instances[1].age", "neither a text, a number nor null"),
        ([{**ROWS[0], "lab": 10**400}], "instances", "is not a number"),
        ([7], "instances[0]", "neither an object"),
        ([], "instances", "at least 1 item"),
    ],
)
def test_a_row_that_does_not_fit_is_named(table: TestClient, instances: Any, field: str, says: str) -> None:
    refused = table.post("/predict", json={"instances": instances})
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert error["field"] == field
    assert says in error["message"]


@pytest.mark.parametrize(
    ("content", "kind", "status", "says"),
    [
        (b"age,ward\n1,2,3\n", "text/csv", 400, "line 2 has 3 values, the header 2"),
        (b"age,ward\n1,a\n", "text/csv", 422, "column 'lab' is missing"),
        (b"age,ward,lab\n", "text/csv", 422, "at least one row"),
        (b"age,age\n1,a\n", "text/csv", 400, "comes twice"),
        (b"\xff\xfe", "text/csv", 400, "not UTF-8"),
        (b'a\n"', "text/csv", 400, "cannot be read as CSV"),
        (b"", "text/csv", 400, "is empty"),
        (b"\x89PNG", "image/png", 415, "this model takes rows of a table"),
        (npy(np.zeros((1, 3))), "application/x-npy", 422, "column 'ward' has categories"),
        (b"{", "application/json", 400, "JSON"),
    ],
)
def test_a_body_that_is_no_table_is_refused(
    table: TestClient, content: bytes, kind: str, status: int, says: str
) -> None:
    refused = post(table, content, kind)
    assert (refused.status_code, says in refused.json()["error"]["message"]) == (status, True), refused.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda inputs: inputs.pop(), "column 'age' is missing"),
        (lambda inputs: inputs.append(inputs[0]), "comes twice"),
        (lambda inputs: inputs[0].update(name="size"), "is no column of this model"),
        (lambda inputs: inputs[1].update(datatype="FP64"), "is not BYTES"),
        (lambda inputs: inputs[1].update(shape=[2]), "is not [3]"),
        (lambda inputs: inputs[2].update(data=[1, 2]), "has 2 values"),
        (lambda inputs: inputs[2].update(data=["a", 1, 2]), "neither a number nor null"),
    ],
)
def test_a_tensor_that_is_no_column_is_refused(table: TestClient, change: Any, says: str) -> None:
    inputs = columns_as_tensors()
    change(inputs)
    refused = table.post("/v2/models/patients/infer", json={"inputs": inputs})
    assert (refused.status_code, says in refused.json()["error"]) == (422, True), refused.text


def test_a_table_of_numbers_is_taken_as_an_array_with_nan_for_missing(tmp_path: Path) -> None:
    numbers = [column for column in COLUMNS if column["kind"] == "numeric"]
    untrained_table(tmp_path / "run", numbers)
    for client in opened(tmp_path / "run"):
        rows = np.array([[71.5, np.nan], [130, 5.25]])
        by_npy = post(client, npy(rows), "application/x-npy").json()["predictions"]
        by_json = client.post("/predict", json={"instances": [[71.5, None], [130, 5.25]]}).json()["predictions"]
        assert by_npy == by_json
        assert [row["outside"] for row in by_npy] == [[], ["age"]]
        refused = post(client, npy(np.array([[np.inf, 1.0]])), "application/x-npy")
        assert "is not a number" in refused.json()["error"]["message"]
