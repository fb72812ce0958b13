"""A gRPC request as the body that the REST form of the protocol would have: a JSON head, and binary tensors behind it.

One judge for both: names, shapes, types and values are checked where those of REST requests are.
"""

import json
import struct
from typing import Any

import numpy as np

from serve.grpc_messages import parse
from serve.inputs import Body
from serve.refusals import RequestError, invalid, malformed
from serve.tensors import NUMBER_TYPES

GRPC = "open inference over gRPC"
# The field of typed contents that holds each datatype; half floats come as raw bytes alone, as the protocol has it.
_FIELDS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def rest_form(content: Body, name: str, version: str) -> tuple[bytes, str]:
    """The body, and the length of its JSON head, of a serialised ModelInferRequest for this model."""
    try:
        request = parse("ModelInferRequest", content)
    except ValueError as error:
        raise malformed("request", str(error)) from None
    if request.model_name != name or request.model_version not in ("", version):
        raise RequestError(404, "unknown_model", "model_name", f"only {name}, version {version}, is served here")
    binary = _contents(request)
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(part)},
        }
        for tensor, part in zip(request.inputs, binary, strict=True)
    ]
    head: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [{"name": output.name} for output in request.outputs]
    for name in ("coverage", "confidence"):
        if name in request.parameters:
            head["parameters"][name] = _number(request.parameters[name], name)
    text = json.dumps(head).encode()
    return b"".join([text, *binary]), str(len(text))


def _contents(request: Any) -> list[bytes]:
    """The bytes of every input: as they came, or of its typed contents."""
    raw = list(request.raw_input_contents)
    if not raw:
        return [_typed(tensor, f"inputs[{number}]") for number, tensor in enumerate(request.inputs)]
    if len(raw) != len(request.inputs):
        raise invalid("raw_input_contents", f"there are {len(raw)}; give one for each of {len(request.inputs)} inputs")
    if any(tensor.HasField("contents") for tensor in request.inputs):
        raise invalid("inputs", "come by contents and by raw_input_contents; use one of the two")
    return raw


def _typed(tensor: Any, field: str) -> bytes:
    if tensor.datatype not in _FIELDS:
        raise invalid(
            f"{field}.datatype", f"{tensor.datatype[:100]!r} has no typed contents; send raw_input_contents, or FP32"
        )
    values = getattr(tensor.contents, _FIELDS[tensor.datatype])
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    wide = np.asarray(values)
    dtype = np.dtype(NUMBER_TYPES[tensor.datatype])
    if dtype.kind in "iu" and len(wide) and not np.iinfo(dtype).min <= wide.min() <= wide.max() <= np.iinfo(dtype).max:
        raise invalid(f"{field}.contents", f"holds a value that is no {tensor.datatype}")
    return wide.astype(dtype).tobytes()


def _number(parameter: Any, name: str) -> float:
    """Clients that know no number with a fraction send it as text."""
    chosen = parameter.WhichOneof("parameter_choice")
    given = getattr(parameter, chosen) if chosen else None
    try:
        if given is None or isinstance(given, bool):
            raise ValueError
        return float(given)
    except ValueError:
        raise invalid(f"parameters.{name}", "is not a number") from None
