"""Messages of the Open Inference Protocol over gRPC, built at run time: no generated code, no compiler to keep in step.

Names and numbers are those of https://github.com/kserve/open-inference-protocol (grpc_predict_v2.proto), with the
model repository's index and the statistics as Triton has them. They live in a pool of their own: a Triton client in the
same process brings messages of the same names along.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

SERVICE = "inference.GRPCInferenceService"
_PACKAGE = "inference"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}
# "*" before a type: repeated; "%": a map from strings; "?": one of several.
_MESSAGES: dict[str, dict[int, str]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {1: "bool live"},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {1: "bool ready"},
    "ModelReadyRequest": {1: "string name", 2: "string version"},
    "ModelReadyResponse": {1: "bool ready"},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {1: "string name", 2: "string version", 3: "*string extensions"},
    "ModelMetadataRequest": {1: "string name", 2: "string version"},
    "TensorMetadata": {1: "string name", 2: "string datatype", 3: "*int64 shape"},
    "ModelMetadataResponse": {
        1: "string name",
        2: "*string versions",
        3: "string platform",
        4: "*TensorMetadata inputs",
        5: "*TensorMetadata outputs",
    },
    "InferParameter": {
        1: "?bool bool_param",
        2: "?int64 int64_param",
        3: "?string string_param",
        4: "?double double_param",
        5: "?uint64 uint64_param",
    },
    "InferTensorContents": {
        1: "*bool bool_contents",
        2: "*int32 int_contents",
        3: "*int64 int64_contents",
        4: "*uint32 uint_contents",
        5: "*uint64 uint64_contents",
        6: "*float fp32_contents",
        7: "*double fp64_contents",
        8: "*bytes bytes_contents",
    },
    "InferInputTensor": {
        1: "string name",
        2: "string datatype",
        3: "*int64 shape",
        4: "%InferParameter parameters",
        5: "InferTensorContents contents",
    },
    "InferRequestedOutputTensor": {1: "string name", 2: "%InferParameter parameters"},
    "InferOutputTensor": {
        1: "string name",
        2: "string datatype",
        3: "*int64 shape",
        4: "%InferParameter parameters",
        5: "InferTensorContents contents",
    },
    "ModelInferRequest": {
        1: "string model_name",
        2: "string model_version",
        3: "string id",
        4: "%InferParameter parameters",
        5: "*InferInputTensor inputs",
        6: "*InferRequestedOutputTensor outputs",
        7: "*bytes raw_input_contents",
    },
    "ModelInferResponse": {
        1: "string model_name",
        2: "string model_version",
        3: "string id",
        4: "%InferParameter parameters",
        5: "*InferOutputTensor outputs",
        6: "*bytes raw_output_contents",
    },
    "RepositoryIndexRequest": {1: "string repository_name", 2: "bool ready"},
    "ModelIndex": {1: "string name", 2: "string version", 3: "string state", 4: "string reason"},
    "RepositoryIndexResponse": {1: "*ModelIndex models"},
    "ModelStatisticsRequest": {1: "string name", 2: "string version"},
    "StatisticDuration": {1: "uint64 count", 2: "uint64 ns"},
    "InferStatistics": {1: "StatisticDuration success", 2: "StatisticDuration fail"},
    "ModelStatistics": {
        1: "string name",
        2: "string version",
        3: "uint64 last_inference",
        4: "uint64 inference_count",
        5: "uint64 execution_count",
        6: "InferStatistics inference_stats",
    },
    "ModelStatisticsResponse": {1: "*ModelStatistics model_stats"},
}


def _add_field(message: Any, number: int, text: str) -> None:
    kind, name = text.split()
    mark, kind = (kind[0], kind[1:]) if kind[0] in "*%?" else ("", kind)
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if mark in ("*", "%"):
        field.label = _Field.LABEL_REPEATED
    if mark == "?":
        field.oneof_index = 0
    if mark == "%":
        # A map is a repeated entry of key and value, by the format's own definition.
        entry = message.nested_type.add(name="ParametersEntry")
        entry.options.map_entry = True
        _add_field(entry, 1, "string key")
        _add_field(entry, 2, f"{kind} value")
        kind = f"{message.name}.{entry.name}"
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _build() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="fedppd/open_inference.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if any(text.startswith("?") for text in fields.values()):
            message.oneof_decl.add(name="parameter_choice")
        for number, text in fields.items():
            _add_field(message, number, text)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _build()


def message(name: str, /, **fields: Any) -> Any:
    return _CLASSES[name](**fields)


def parse(name: str, content: bytes | bytearray) -> Any:
    """Raises `ValueError` for what is no such message."""
    try:
        return _CLASSES[name].FromString(bytes(content))
    except DecodeError as error:
        raise ValueError(f"is not a {name}: {error}") from None
