"""From a request to its answer: the one path that all prediction routes share.

Nothing here keeps the event loop for more than a millisecond or so: what may take longer to decode is decoded
elsewhere, and long answers are written in pieces.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from pydantic_core import to_json
from starlette.requests import Request

from fedppd_ray.data.parts import RawRows
from fedppd_ray.data.pixels import hint_for
from fedppd_ray.errors import ConfigError
from fedppd_ray.inference.abstention import abstention_level
from fedppd_ray.inference.conformal import conformal_level
from fedppd_ray.inference.student import describe_predictions
from serve import inputs
from serve.access_log import current_request
from serve.body import Admission, read_body
from serve.decoder_process import TENSORS
from serve.decoders import Decoders
from serve.drift import Drift
from serve.grpc_tensors import GRPC, rest_form
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.priority import lower_priority
from serve.refusals import RequestError, invalid
from serve.rows import Outside, array_sides, from_array
from serve.settings import Settings
from serve.structure import NAMES, is_quick
from serve.student import ServedStudent
from serve.takes import ImageInput, TableInput, Takes
from serve.tensors import QUOTES, Wish, json_length, read_tensors
from serve.tracing import stage

# Rows of a table in so many bytes of JSON or CSV are decoded in a few milliseconds.
_QUICK_TABLE_BYTES = 16 * 1024
# Numbers that are described, or written as JSON, in about half a millisecond.
_PIECE = 2048


@dataclass(frozen=True)
class Given:
    """The images of a request, checked, and what else its body asks for."""

    values: RawRows
    hint: str | None = None
    asked: inputs.Asked = inputs.NOTHING
    outside: Outside | None = None  # of rows of a table: columns beyond what training saw


@dataclass(frozen=True)
class Answer:
    """What the current student said, with the current abstention level."""

    student: ServedStudent
    level: dict[str, float] | None
    predictions: list[dict[str, Any]]
    hint: str | None
    sets: dict[str, Any] | None = None  # how the sets were made, where a confidence was asked for


class Answerer:
    def __init__(self, predictor: Predictor, settings: Settings, metrics: Metrics) -> None:
        self.predictor = predictor
        self.settings = settings
        self._metrics = metrics
        self.drift = Drift(settings, metrics)
        self.admission = Admission(settings, metrics.pending)
        self._decoders = Decoders(settings.decode_seconds, settings.decoders, metrics.decoders_lost.inc)
        # Checks and copies of large arrays; numpy lets the event loop run meanwhile.
        self._arrays = ThreadPoolExecutor(1, thread_name_prefix="arrays", initializer=lower_priority)

    def start(self) -> None:
        self._decoders.start()

    async def close(self) -> None:
        await self._decoders.close()
        self._arrays.shutdown(wait=False, cancel_futures=True)

    async def predict(self, request: Request, media_type: str, query: inputs.Asked) -> Answer:
        """`POST /predict`, whatever the body's media type."""
        with self.admission.admit() as place:
            with stage("body"):
                body = await read_body(request, place, self.settings)
            # Taken once: input and answer belong to this student, even if another is swapped in meanwhile.
            student = self._chosen()
            with stage("decode"):
                given = await self._given(body, media_type, student)
            asked = _agreed(query, given.asked)
            try:
                return await self.answer(student, given, asked)
            except Exception as error:  # of a candidate, which takes the same inputs: nobody shall notice
                if not self._gave_up(student, error):
                    raise
                return await self.answer(self.predictor.current, given, asked)

    def _chosen(self) -> ServedStudent:
        trial = self.predictor.trial
        canary = None if trial is None else trial.canary_for(current_request.get())
        return canary or self.predictor.current

    def _gave_up(self, student: ServedStudent, error: Exception) -> bool:
        """Whether it was a candidate that failed; a caller's own mistake is none of its failures."""
        trial = self.predictor.trial
        if trial is None or student is self.predictor.current:
            return False
        if isinstance(error, RequestError) and error.status < 500:
            return False
        trial.give_up(student)
        return True

    async def _given(self, body: inputs.Body, media_type: str, student: ServedStudent) -> Given:
        takes = student.takes
        _require_fitting(media_type, takes)
        if media_type == inputs.NPY:
            sides = takes.sides if isinstance(takes, ImageInput) else array_sides(takes)
            return await self._checked("body", inputs.open_npy(body, sides, self.settings.max_images), student)
        if student.validator is not None and media_type == inputs.JSON and inputs.is_brief_json(body):
            values, asked = inputs.decode_json(body, student.validator)
            return Given(values, _hint(values, student), asked)
        values, facts = await self._elsewhere({"kind": media_type}, body, student, _is_quick(body, media_type, takes))
        return Given(values, facts.get("hint"), inputs.Asked(*facts.get("asked", ())), facts.get("outside"))

    async def tensors(self, body: inputs.Body, header: str | None, student: ServedStudent) -> tuple[Wish, Given]:
        """The body of an Open Inference request."""
        length, takes = json_length(body, header), student.takes
        brief = inputs.is_brief_json(body if length == len(body) else body[:length], QUOTES)
        if brief and isinstance(takes, ImageInput):
            wish, array = read_tensors(body, length, takes, self.settings.max_images)
            return wish, await self._checked("inputs[0].data", array, student)
        quick = isinstance(takes, TableInput) and len(body) <= _QUICK_TABLE_BYTES
        values, facts = await self._elsewhere({"kind": TENSORS, "header": header}, body, student, quick)
        return Wish(**facts["wish"]), Given(values, facts.get("hint"), outside=facts.get("outside"))

    async def grpc_tensors(self, body: inputs.Body, student: ServedStudent) -> tuple[Wish, Given]:
        """A serialised ModelInferRequest. What is not small is parsed elsewhere, like the JSON of its REST form."""
        if len(body) <= inputs.BRIEF_BYTES:
            return await self.tensors(*rest_form(body, student.name, student.version), student)
        task = {"kind": GRPC, "model": [student.name, student.version]}
        values, facts = await self._elsewhere(task, body, student, quick=False)
        return Wish(**facts["wish"]), Given(values, facts.get("hint"), outside=facts.get("outside"))

    async def _checked(self, field: str, array: NDArray[Any], student: ServedStudent) -> Given:
        def check() -> Given:
            if isinstance(student.takes, TableInput):
                rows, odd = from_array(array, student.takes)
                return Given(rows, outside=odd)
            values = inputs.checked_pixels(field, array, student.takes)
            return Given(values, _hint(values, student))

        bytes_of_bytes = array.dtype == "u1" and isinstance(student.takes, ImageInput)
        if array.nbytes <= inputs.BRIEF_ARRAY_BYTES or bytes_of_bytes:
            return check()
        return await asyncio.get_running_loop().run_in_executor(self._arrays, check)

    async def _elsewhere(
        self, task: dict[str, Any], body: inputs.Body, student: ServedStudent, quick: bool
    ) -> tuple[RawRows, dict[str, Any]]:
        limits = {"max_pixels": self.settings.max_pixels, "max_images": self.settings.max_images}
        try:
            async with asyncio.timeout(self.settings.predict_timeout_seconds):
                decoded = await self._decoders.decode(task | limits | {"takes": student.description}, body, quick)
        except TimeoutError:
            raise _timeout("decoding", self.settings) from None
        return decoded.values, decoded.facts

    async def answer(self, student: ServedStudent, given: Given, asked: inputs.Asked) -> Answer:
        """Rows that have been checked, through the batcher, described and counted."""
        try:
            level = abstention_level(student.card, asked.coverage)
            sets = conformal_level(student.card, asked.confidence)
        except ConfigError as error:
            field, _, reason = str(error).partition(": ")
            raise invalid(field, reason) from None
        try:
            with stage("forward"):
                log_probabilities = await self.predictor.log_probabilities(student, given.values)
        except TimeoutError:
            raise _timeout("the prediction", self.settings) from None
        predictions: list[dict[str, Any]] = []
        async for rows in in_pieces(*log_probabilities.shape):
            predictions += describe_predictions(student.card, log_probabilities[rows], *asked)
        for prediction, names in zip(predictions, given.outside or (), strict=False):
            prediction["outside"] = names
        self._count(predictions)
        if student is self.predictor.current:  # not a candidate, nor one that was just replaced
            self.drift.note(student, log_probabilities)
        if (trial := self.predictor.trial) is not None:
            trial.offer(current_request.get(), given.values)
        return Answer(student, level, predictions, given.hint, sets.described(student.card) if sets else None)

    def _count(self, predictions: list[dict[str, Any]]) -> None:
        self._metrics.last_inference = time.time_ns() // 1_000_000
        self._metrics.entropy.observe_all([prediction["entropy"] for prediction in predictions])
        abstained = sum(prediction["abstain"] for prediction in predictions)
        for label, count in (("true", abstained), ("false", len(predictions) - abstained)):
            if count:
                self._metrics.predictions.inc(label, by=count)


def _agreed(query: inputs.Asked, body: inputs.Asked) -> inputs.Asked:
    """The query's word or the body's, where they do not contradict each other."""
    for field, outside, inside in zip(query._fields, query, body, strict=True):
        if outside is not None and inside is not None and outside != inside:
            raise invalid(field, f"the query and the body ask for a different {field}")
    return inputs.Asked(*(inside if outside is None else outside for outside, inside in zip(query, body, strict=True)))


def _require_fitting(media_type: str, takes: Takes) -> None:
    """A table's rows come as JSON, CSV or arrays, images as anything but CSV."""
    if isinstance(takes, TableInput) and media_type in inputs.IMAGES:
        kinds = [kind for kind in inputs.MEDIA_TYPES if kind not in inputs.IMAGES]
        raise unsupported(media_type, kinds, "this model takes rows of a table")
    if isinstance(takes, ImageInput) and media_type == inputs.CSV:
        kinds = [kind for kind in inputs.MEDIA_TYPES if kind != inputs.CSV]
        raise unsupported(media_type, kinds, "this model takes images")


def unsupported(given: str, kinds: Sequence[str], why: str = "") -> RequestError:
    reason = f" ({why})" if why else ""
    message = f"{given[:100]!r} is not taken{reason}; send one of {', '.join(kinds)}"
    return RequestError(415, "unsupported_media_type", "Content-Type", message)


def _is_quick(body: inputs.Body, media_type: str, takes: Takes) -> bool:
    if isinstance(takes, TableInput):
        return len(body) <= _QUICK_TABLE_BYTES
    return media_type in NAMES and is_quick(body, media_type)


def _hint(values: RawRows, student: ServedStudent) -> str | None:
    return hint_for(values, student.takes.range) if isinstance(student.takes, ImageInput) else None


async def in_pieces(rows: int, width: int) -> AsyncIterator[slice]:
    """Slices of rows of so many numbers; between two of them, others have their turn on the event loop."""
    step = max(1, _PIECE // width)
    for start in range(0, rows, step):
        if start:
            await asyncio.sleep(0)
        yield slice(start, start + step)


async def json_list(values: list[Any], width: int) -> bytes:
    """A JSON list of values that hold `width` numbers each."""
    return b"[" + b",".join([to_json(values[piece])[1:-1] async for piece in in_pieces(len(values), width)]) + b"]"


def _timeout(what: str, settings: Settings) -> RequestError:
    seconds = settings.predict_timeout_seconds
    return RequestError(504, "timeout", "", f"{what} took longer than {seconds:g} s; send fewer images, or try again")
