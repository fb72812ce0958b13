"""The Open Inference Protocol over gRPC, asked by Triton's own client and by callers with bad intent."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from serve.grpc_messages import _CLASSES, SERVICE
from serve.tokens import token_digest
from tests.service.conftest import Client
from tests.service.exports import untrained_table
from tests.service.live import free_port

TOKEN = {"authorization": "Bearer right"}
INFER = f"/{SERVICE}/ModelInfer"


def image(rows: Any, kind: str = "UINT8") -> triton.InferInput:
    tensor = triton.InferInput("image", list(rows.shape), kind)
    tensor.set_data_from_numpy(rows)
    return tensor


@pytest.fixture
def served(open_client: Client, digits_run: Path, tmp_path: Path) -> Iterator[tuple[Any, triton.InferenceServerClient]]:
    """The HTTP client, and Triton's, of one application."""
    port = free_port()
    http = open_client(
        digits_run,
        grpc_port=port,
        tokens={"ward": token_digest("right")},
        failed_logins_a_second=0.01,
        body_timeout_seconds=1.0,
        access_log=str(tmp_path / "access.jsonl"),
    )
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    yield http, client
    client.close()


def refused(call: Any) -> str:
    with pytest.raises(triton.InferenceServerException) as caught:
        call()
    return str(caught.value.status())


@pytest.mark.parametrize("name", _CLASSES)
def test_messages_have_the_numbers_and_types_of_tritons_own(name: str) -> None:
    found = {message.name: message for message in service_pb2.DESCRIPTOR.message_types_by_name.values()}
    nested = {inner.name: inner for outer in found.values() for inner in outer.nested_types}
    theirs = (nested | found)[name].fields_by_number
    for field in _CLASSES[name].DESCRIPTOR.fields:
        other = theirs[field.number]
        assert (field.name, field.type, field.is_repeated) == (other.name, other.type, other.is_repeated)


def test_triton_gets_by_grpc_what_http_answers(served: Any, digits: Any) -> None:
    http, client = served
    rows = np.array(digits.images[:20, 0])
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert "statistics" in client.get_server_metadata().extensions
    metadata = client.get_model_metadata("digits")
    assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [("image", "FP32", [-1, 28, 28])]
    body = {"instances": rows.tolist(), "coverage": 0.8, "confidence": 0.9}
    headers = {"Authorization": "Bearer right"}
    expected = http.post("/predict", json=body, headers=headers).json()["predictions"]
    for prediction in expected:  # as a tensor: whether each class is in the set
        prediction["set"] = [str(label) in prediction["set"] for label in range(10)]
    asked = {"coverage": "0.8", "confidence": "0.9"}
    for kind, dtype in (("UINT8", np.uint8), ("FP32", np.float32), ("INT64", np.int64)):
        tensor = image(rows.astype(dtype), kind)
        result = client.infer("digits", [tensor], headers=TOKEN, parameters=asked, request_id="w-1")
        for output in metadata.outputs:
            found = result.as_numpy(output.name)
            wanted = [prediction[output.name] for prediction in expected]
            if output.datatype == "BYTES":
                assert found.astype(str).tolist() == wanted
            else:
                np.testing.assert_allclose(found, wanted, atol=1e-6)
        assert result.get_response().id == "w-1"
    chosen = client.infer("digits", [tensor], outputs=[triton.InferRequestedOutput("label")], headers=TOKEN)
    assert [output.name for output in chosen.get_response().outputs] == ["label"]


def test_typed_contents_are_taken_too(served: Any) -> None:
    _, client = served
    request = service_pb2.ModelInferRequest(model_name="digits")
    request.inputs.add(name="image", datatype="FP32", shape=[1, 28, 28]).contents.fp32_contents.extend([0.5] * 784)
    stub = client._client_stub
    answer = stub.ModelInfer(request, metadata=list(TOKEN.items()))
    assert "hint" in answer.parameters, "all values lie within 0 and 1"
    request.inputs[0].datatype = "UINT8"
    request.inputs[0].contents.Clear()
    request.inputs[0].contents.uint_contents.extend([256] * 784)
    with pytest.raises(grpc.RpcError, match="no UINT8"):
        stub.ModelInfer(request, metadata=list(TOKEN.items()))


def test_a_large_request_is_decoded_elsewhere_and_answered(served: Any) -> None:
    _, client = served
    rows = np.zeros((600, 28, 28), np.float32)
    assert client.infer("digits", [image(rows, "FP32")], headers=TOKEN).as_numpy("label").shape == (600,)


def test_refusals_have_the_protocols_codes(served: Any) -> None:
    _, client = served
    sound, small = image(np.zeros((1, 28, 28), np.uint8)), image(np.zeros((1, 5, 5), np.uint8))
    assert refused(lambda: client.infer("digits", [sound])) == "StatusCode.UNAUTHENTICATED"
    assert refused(lambda: client.infer("other", [sound], headers=TOKEN)) == "StatusCode.NOT_FOUND"
    assert refused(lambda: client.get_model_metadata("other")) == "StatusCode.NOT_FOUND"
    assert refused(lambda: client.infer("digits", [small], headers=TOKEN)) == "StatusCode.INVALID_ARGUMENT"
    for coverage in ("2", "x", "nan", True):
        asked = {"headers": TOKEN, "parameters": {"coverage": coverage}}
        code = refused(partial(client.infer, "digits", [sound], **asked))
        assert code == "StatusCode.INVALID_ARGUMENT"
    huge = image(np.zeros((30_000, 28, 28), np.uint8))
    assert refused(lambda: client.infer("digits", [huge], headers=TOKEN)) == "StatusCode.RESOURCE_EXHAUSTED"


def test_guesses_are_throttled_together_with_those_over_http(served: Any) -> None:
    _, client = served
    sound = image(np.zeros((1, 28, 28), np.uint8))
    wrong = {"authorization": "Bearer wrong"}
    codes = [refused(lambda: client.infer("digits", [sound], headers=wrong)) for _ in range(12)]
    assert codes == ["StatusCode.UNAUTHENTICATED"] * 10 + ["StatusCode.RESOURCE_EXHAUSTED"] * 2


def test_calls_are_counted_logged_and_in_the_statistics(served: Any, tmp_path: Path) -> None:
    http, client = served
    sound = image(np.zeros((3, 28, 28), np.uint8))
    client.infer("digits", [sound], headers=TOKEN | {"x-request-id": "ward-7"})
    (model,) = client.get_model_repository_index().models
    assert (model.name, model.state) == ("digits", "READY")
    (figures,) = client.get_inference_statistics("digits").model_stats
    assert (figures.inference_count, figures.inference_stats.success.count) == (3, 1)
    assert f'fedppd_requests_total{{route="{INFER}",status="200"}} 1.0' in http.get("/metrics").text
    http.__exit__()
    entries = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    (entry,) = [entry for entry in entries if entry["path"] == INFER]
    assert (entry["id"], entry["token"], entry["client"], entry["status"]) == ("ward-7", "ward", "127.0.0.1", 200)


def test_a_call_whose_message_never_arrives_is_ended(served: Any) -> None:
    _, client = served
    pending: Any = client._channel.stream_unary(INFER)

    def nothing() -> Iterator[bytes]:
        time.sleep(10)
        yield b""

    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        pending(nothing(), metadata=list(TOKEN.items()))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff" * 100, b"\x2a\x00" * 10_000, b"\x2a\x00" * 3_000_000, b"\x3a\x00" * 3_000_000, b"\x0a\x03abc"],
    ids=["empty", "garbage", "thousands of inputs", "millions of inputs", "millions of contents", "another model"],
)
def test_crafted_messages_are_the_callers_fault(served: Any, body: bytes) -> None:
    http, client = served
    with pytest.raises(grpc.RpcError) as caught:
        client._channel.unary_unary(INFER)(body, metadata=list(TOKEN.items()))
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert 'status="500"' not in http.get("/metrics").text


def test_a_table_has_a_tensor_per_column(open_client: Client, tmp_path: Path) -> None:
    port = free_port()
    untrained_table(tmp_path / "run")
    http = open_client(tmp_path / "run", grpc_port=port)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    age = triton.InferInput("age", [2], "FP64")
    age.set_data_from_numpy(np.array([50.0, 120.0]))
    ward = triton.InferInput("ward", [2], "BYTES")
    ward.set_data_from_numpy(np.array(["a", "b, c"], object))
    lab = triton.InferInput("lab", [2], "FP64")
    lab.set_data_from_numpy(np.array([np.nan, 4.0]))
    result = client.infer("patients", [age, ward, lab])
    rows = [{"age": 50, "ward": "a", "lab": None}, {"age": 120, "ward": "b, c", "lab": 4}]
    expected = http.post("/predict", json={"instances": rows}).json()["predictions"]
    np.testing.assert_allclose(
        result.as_numpy("probabilities"), [prediction["probabilities"] for prediction in expected], atol=1e-6
    )
    assert result.as_numpy("outside").astype(str).tolist() == ["", "age"]
    client.close()
