"""From a request to its answer: the one path that all prediction routes share."""

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from fedppd_ray.errors import ConfigError
from fedppd_ray.prediction import Pixels, abstention_level, describe_predictions
from serve import inputs
from serve.body import Admission, read_body
from serve.errors import RequestError, invalid
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from serve.student import ServedStudent

# Larger images are decoded in a thread.
_SMALL_IMAGE_PIXELS = 256 * 256


@dataclass(frozen=True)
class Answer:
    """What the student in force said, with the abstention level in force."""

    student: ServedStudent
    level: dict[str, float] | None
    predictions: list[dict[str, Any]]


class Answerer:
    def __init__(self, predictor: Predictor, settings: Settings, metrics: Metrics) -> None:
        self.predictor = predictor
        self.settings = settings
        self._metrics = metrics
        self.admission = Admission(settings, metrics.pending)

    async def predict(self, request: Request, media_type: str, coverage: float | None) -> Answer:
        """`POST /predict`, whatever the body's media type."""
        with self.admission.admit() as place:
            body = await read_body(request, place, self.settings)
            # Taken once: input and answer belong to this student, even if another is swapped in meanwhile.
            student = self.predictor.current
            if media_type == inputs.JSON:
                pixels, wanted = inputs.decode_json(body, student.validator)
                if coverage is not None and wanted is not None and coverage != wanted:
                    raise invalid("coverage", "the query and the body ask for different coverages")
                coverage = coverage if wanted is None else wanted
            elif media_type == inputs.NPY:
                pixels = inputs.decode_npy(body, student.shape, self.settings.max_images)
            else:
                pixels = await self._image(body, media_type, student)
            return await self.answer(student, pixels, coverage)

    async def _image(self, body: bytes, media_type: str, student: ServedStudent) -> Pixels:
        image = inputs.open_image(body, media_type, self.settings.max_pixels)
        if image.width * image.height <= _SMALL_IMAGE_PIXELS:
            return inputs.decode_image(image, media_type, student.shape)
        return await asyncio.to_thread(inputs.decode_image, image, media_type, student.shape)

    async def answer(self, student: ServedStudent, pixels: Pixels, coverage: float | None) -> Answer:
        """Rows that have been checked, through the batcher, described and counted."""
        try:
            level = abstention_level(student.card, coverage)
        except ConfigError as error:
            raise invalid("coverage", str(error).removeprefix("coverage: ")) from None
        try:
            log_probabilities = await self.predictor.log_probabilities(student, pixels)
        except TimeoutError:
            seconds = self.settings.predict_timeout_seconds
            message = f"the prediction took longer than {seconds:g} s; send fewer images, or try again"
            raise RequestError(504, "timeout", "", message) from None
        predictions = describe_predictions(student.card, log_probabilities, coverage)
        self._count(predictions)
        return Answer(student, level, predictions)

    def _count(self, predictions: list[dict[str, Any]]) -> None:
        self._metrics.entropy.observe_all([prediction["entropy"] for prediction in predictions])
        abstained = sum(prediction["abstain"] for prediction in predictions)
        for label, count in (("true", abstained), ("false", len(predictions) - abstained)):
            if count:
                self._metrics.predictions.inc(label, by=count)
