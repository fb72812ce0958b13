"""The service exactly at its limits; its counters; and that an answer is one student's, however a reload falls."""

import asyncio
import io
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.requests import Request

from fedppd_ray.data.pixels import fit, picture, to_predict
from fedppd_ray.inference.abstention import abstention_level
from fedppd_ray.inference.scores import entropy
from fedppd_ray.inference.student import describe_predictions
from fedppd_ray.runs.export import export_student, read_card, read_student
from fedppd_ray.runs.store import RunStore
from serve import inputs
from serve.answers import Answerer
from serve.batching import Batcher
from serve.body import Admission, Overload, read_body
from serve.errors import RequestError
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from serve.student import ServedStudent
from serve.takes import ImageInput


def fitted(image: Image.Image) -> Any:
    wanted = to_predict((1, 28, 28), (0.0, 255.0))
    return fit(picture(image, wanted), wanted)


def just_below(value: float) -> float:
    return math.nextafter(value, -math.inf)


# ---- limits of a request


@pytest.mark.parametrize("count", [1, 5])
def test_as_many_images_as_are_allowed_are_taken(count: int) -> None:
    inputs.check_count("body", count, 5)


@pytest.mark.parametrize("count", [0, 6])
def test_none_and_one_too_many_are_refused(count: int) -> None:
    with pytest.raises(RequestError) as caught:
        inputs.check_count("body", count, 5)
    assert caught.value.status == 422


def test_pixels_from_0_to_255_are_taken_and_nothing_beyond() -> None:
    takes = ImageInput((1, 1, 2))
    inputs.check_range("body", np.array([0.0, 255.0]), takes)
    for value in (just_below(0.0), math.nextafter(255.0, 256), math.nan, math.inf):
        with pytest.raises(RequestError, match="0–255"):
            inputs.check_range("body", np.array([1.0, value]), takes)


def test_an_image_of_exactly_the_allowed_pixels_is_decoded() -> None:
    stream, takes = io.BytesIO(), ImageInput((1, 30, 20))
    Image.new("L", (20, 30)).save(stream, format="PNG")
    assert inputs.decode_image(stream.getvalue(), inputs.PNG, takes, 600).shape == (1, 1, 30, 20)
    with pytest.raises(RequestError) as caught:
        inputs.decode_image(stream.getvalue(), inputs.PNG, takes, 599)
    assert caught.value.status == 413


def request(*parts: bytes, announced: int | None = None) -> Request:
    """A POST whose body comes in these parts."""
    waiting = [{"type": "http.request", "body": part, "more_body": k + 1 < len(parts)} for k, part in enumerate(parts)]

    async def receive() -> Any:
        return waiting.pop(0)

    headers = [] if announced is None else [(b"content-length", str(announced).encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def settings_of(**changes: Any) -> Settings:
    return Settings(run="", **changes)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("extra", [0, 1])
def test_a_body_of_exactly_the_allowed_bytes_is_read(announced: bool, extra: int) -> None:
    settings = settings_of(max_body_bytes=2048)
    parts = (b"a" * 1000, b"b" * (1048 + extra))
    admission = Admission(settings, Metrics().pending)

    async def read() -> bytes:
        with admission.admit() as place:
            return await read_body(request(*parts, announced=2048 + extra if announced else None), place, settings)

    if extra:
        with pytest.raises(RequestError) as caught:
            asyncio.run(read())
        assert caught.value.status == 413
    else:
        assert asyncio.run(read()) == b"".join(parts)


def test_the_last_allowed_request_is_admitted_and_the_next_is_not() -> None:
    metrics = Metrics()
    admission = Admission(settings_of(max_pending=2), metrics.pending)
    with admission.admit():
        with admission.admit():
            assert metrics.pending.value == 2
            with pytest.raises(Overload), admission.admit():
                pass
            assert metrics.pending.value == 2
        with admission.admit():
            pass
    assert metrics.pending.value == 0


def test_bodies_together_may_hold_exactly_what_is_allowed_and_give_it_back() -> None:
    admission = Admission(settings_of(max_pending_bytes=3000), Metrics().pending)
    for _ in range(2):
        with admission.admit() as one, admission.admit() as other:
            one.hold(1000)
            other.hold(1500)
            other.hold(500)
            with pytest.raises(Overload):
                one.hold(1)
            assert (one.held, other.held) == (1000, 2000)


# ---- a served student


@pytest.fixture(scope="module")
def run_folder(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("served") / "run"))


def export_next(run: Path) -> None:
    """Another student of the same run: other weights, another threshold, the next round."""
    own, model = read_student(run)
    model.load(model.export() * np.float32(1.5))
    abstention = {**own["abstention"], "threshold": 1e-6}
    export_student(run, RunStore(run).config(), own["round"] + 1, model, own["metrics"], abstention)


@pytest.fixture
def predictor(finished_run: Path, tmp_path: Path) -> Iterator[Predictor]:
    run = shutil.copytree(finished_run, tmp_path / "run")
    made = Predictor(Settings(run=str(run), threads=1), Metrics())
    yield made
    made.close()


def npy(rows: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, rows)
    return stream.getvalue()


def samples(text: str, name: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name)]
    return {key.removeprefix(name): float(value) for key, _, value in lines}


@pytest.mark.parametrize("when", ["while the body arrives", "while a large image is decoded", "while the network runs"])
def test_an_answer_is_one_students_however_a_reload_falls(
    when: str, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validated, computed, judged and named by the same student: the one that was current when the body was there."""
    first = predictor.current
    first.card["abstention"]["threshold"] = 10.0  # it answers everything, and the next student nothing
    drawn = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300), np.uint8))
    content = io.BytesIO()
    drawn.save(content, format="PNG")
    rows = fitted(drawn)[None]
    answerer = Answerer(predictor, predictor._settings, predictor.metrics)
    asked = request(content.getvalue())

    def reload() -> None:
        export_next(Path(predictor._run))
        assert predictor.refresh() is True

    if when == "while the body arrives":
        receive = asked._receive

        async def late() -> Any:
            reload()
            return await receive()

        asked._receive = late
    elif when == "while a large image is decoded":
        decode = answerer._elsewhere

        async def slow(*arguments: Any, **named: Any) -> Any:
            reload()
            return await decode(*arguments, **named)

        monkeypatch.setattr(answerer, "_elsewhere", slow)
    else:
        real = predictor.log_probabilities

        async def interrupted(student: ServedStudent, pixels: Any) -> Any:
            reload()
            return await real(student, pixels)

        monkeypatch.setattr(predictor, "log_probabilities", interrupted)
    answer = asyncio.run(answerer.predict(asked, inputs.PNG, inputs.NOTHING))
    second = predictor.current
    assert second.version != first.version
    own = second if when == "while the body arrives" else first
    assert answer.student is own
    assert answer.level == abstention_level(own.card)
    expected = describe_predictions(own.card, own.log_probabilities(rows))
    assert expected[0]["abstain"] is (own is second)
    assert [row["abstain"] for row in answer.predictions] == [row["abstain"] for row in expected]
    np.testing.assert_allclose(
        [row["probabilities"] for row in answer.predictions], [row["probabilities"] for row in expected], atol=1e-6
    )


def test_a_reload_is_counted_by_what_became_of_it(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.predictor._PAUSE_SECONDS", 0.001)
    run = Path(predictor._run)
    for _ in range(2):
        export_next(run)
        assert predictor.refresh() is True
    sound = (run / "student" / "model.json").read_text()
    (run / "student" / "model.json").write_text("{")
    assert predictor.refresh() is False
    text = predictor.metrics.text().decode()
    assert samples(text, "fedppd_reloads_total") == {'{result="swapped"}': 2.0, '{result="refused"}': 1.0}
    assert (predictor.state.reloads, predictor.state.refused) == (2, 1)
    assert samples(text, "fedppd_model_round") == {"": 4.0}
    assert samples(text, "fedppd_reload_failing") == {"": 1.0}
    (run / "student" / "model.json").write_text(sound)
    export_next(run)
    assert predictor.refresh() is True
    assert samples(predictor.metrics.text().decode(), "fedppd_reload_failing") == {"": 0.0}


def test_every_export_has_a_version_of_its_own(finished_run: Path, tmp_path: Path) -> None:
    """Also two of the same round, as a round that is repeated after a crash may be."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    own, model = read_student(run)
    versions = {own["version"]}
    for factor in (1.0, 1.5, 2.0):
        model.load(model.export() * np.float32(factor))
        export_student(run, RunStore(run).config(), own["round"], model, own["metrics"], own["abstention"])
        versions.add(read_card(run)["version"])
    assert len(versions) == 3  # the first export anew is the same


@pytest.mark.parametrize(
    ("query", "body", "answered"), [(None, None, 0.95), (0.5, None, 0.5), (None, 0.6, 0.6), (0.7, 0.7, 0.7)]
)
def test_the_coverage_may_be_asked_for_in_the_query_or_in_the_body(
    query: float | None, body: float | None, answered: float, predictor: Predictor
) -> None:
    answerer = Answerer(predictor, predictor._settings, predictor.metrics)
    content = {"instances": [np.zeros((28, 28)).tolist()], **({} if body is None else {"coverage": body})}
    answer = asyncio.run(answerer.predict(request(json.dumps(content).encode()), inputs.JSON, inputs.Asked(query)))
    assert answer.level == abstention_level(predictor.current.card, answered)
    assert answer.level is not None
    assert answer.level["coverage"] == answered


def test_abstentions_and_answers_are_counted_apart(predictor: Predictor) -> None:
    answerer = Answerer(predictor, predictor._settings, predictor.metrics)
    student = predictor.current
    images = np.random.default_rng(1).integers(0, 256, (40, 28, 28), np.uint8)
    levels = np.sort(entropy(student.log_probabilities(images[:, None])))
    student.card["abstention"]["threshold"] = float(levels[29]) + 1e-7  # between two rows: ten abstain
    answer = asyncio.run(answerer.predict(request(npy(images)), inputs.NPY, inputs.NOTHING))
    assert sum(row["abstain"] for row in answer.predictions) == 10
    text = predictor.metrics.text().decode()
    assert samples(text, "fedppd_predictions_total") == {'{abstain="true"}': 10.0, '{abstain="false"}': 30.0}
    assert samples(text, "fedppd_entropy_nats_count") == {"": 40.0}


def test_a_value_at_a_buckets_bound_is_in_that_bucket() -> None:
    for add in ("observe", "observe_all"):
        metrics = Metrics()
        for value in (16.0, 17.0):
            getattr(metrics.batch_rows, add)(value)
        found = samples(metrics.text().decode(), "fedppd_batch_rows")
        assert found['_bucket{le="8"}'] == 0
        assert found['_bucket{le="16"}'] == 1
        assert found['_bucket{le="32"}'] == found["_count"] == 2
        assert found["_sum"] == 33


@pytest.mark.parametrize(
    ("sizes", "passes"),
    [([3, 2], [5]), ([3, 3], [3, 3]), ([5, 1], [5, 1]), ([6], [6]), ([2, 2, 2, 2], [4, 4]), ([6, 2, 3], [6, 5])],
)
def test_requests_share_a_pass_of_exactly_the_allowed_rows(
    sizes: list[int], passes: list[int], run_folder: Path
) -> None:
    student = ServedStudent.load(run_folder, 100)
    rows = np.random.default_rng(2).integers(0, 256, (sum(sizes), 1, 28, 28), np.uint8)
    seen: list[int] = []

    async def ask() -> list[Any]:
        batcher = Batcher(5, 1, seen.append)
        ends = np.cumsum(sizes)
        asked = [
            batcher.log_probabilities(student, rows[end - size : end]) for size, end in zip(sizes, ends, strict=True)
        ]
        answers = await asyncio.gather(*asked)
        batcher.close()
        return answers

    answers = asyncio.run(ask())
    assert seen == passes
    np.testing.assert_allclose(np.concatenate(answers), student.log_probabilities(rows), atol=1e-5)


def test_a_pass_that_fails_holds_nobody_up_who_waits_behind_it(run_folder: Path) -> None:
    one, other = (ServedStudent.load(run_folder, 100) for _ in range(2))
    rows = np.zeros((1, 1, 28, 28), np.uint8)

    async def ask() -> list[Any]:
        batcher = Batcher(5, 1, lambda _: None)
        async with asyncio.timeout(20):
            failing = batcher.log_probabilities(one, np.zeros((1, 1, 5, 5), np.uint8))
            answers = await asyncio.gather(failing, batcher.log_probabilities(other, rows), return_exceptions=True)
        batcher.close()
        return answers

    error, answer = asyncio.run(ask())
    assert isinstance(error, RuntimeError)
    np.testing.assert_allclose(answer, other.log_probabilities(rows), atol=1e-6)


def test_an_image_of_another_size_is_fitted_by_mixing_its_pixels() -> None:
    """A chequered one of twice the size becomes grey; the nearest pixel would make it black or white."""
    chequered = np.indices((56, 56)).sum(0) % 2 * np.uint8(254)
    grey = fitted(Image.fromarray(chequered.astype(np.uint8)))
    assert grey.shape == (1, 28, 28)
    assert np.abs(grey[0, 1:-1, 1:-1].astype(int) - 127).max() <= 2


def test_a_json_request_of_exactly_the_allowed_images_is_taken(run_folder: Path) -> None:
    student = ServedStudent.load(run_folder, 2)
    image = np.zeros((28, 28)).tolist()
    body = '{{"instances": {}}}'.format
    assert len(inputs.decode_json(body([image] * 2).encode(), student.validator)[0]) == 2
    for images in ([], [image] * 3):
        with pytest.raises(RequestError):
            inputs.decode_json(body(images).encode(), student.validator)
