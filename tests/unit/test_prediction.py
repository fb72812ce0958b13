"""What `predict` answers equals what `evaluate` computed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedppd_ray.data.datasets import load
from fedppd_ray.data.glyphs import draw_glyphs
from fedppd_ray.data.parts import BYTES
from fedppd_ray.data.pictures import picture_rows, write_sample
from fedppd_ray.errors import ConfigError, FedPPDError
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import network_predictor
from fedppd_ray.inference.scores import entropy
from fedppd_ray.inference.temperature import scaled
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.run import Run
from fedppd_ray.runs.store import RunStore


def read_image(path: Path, shape: tuple[int, int, int]) -> Any:
    return picture_rows([path], shape, BYTES)[0]


def test_a_predicted_file_has_the_probabilities_that_evaluation_computed(finished_run: Path, tmp_path: Path) -> None:
    indices = [0, 7, 501, 999]
    files = [tmp_path / f"{index}.png" for index in indices]
    for index, file in zip(indices, files, strict=True):
        write_sample("mnist5k", index, file, None)
    card, student = read_student(finished_run)
    raw = HeldOut(RunStore(finished_run).config()).log_probabilities(network_predictor(student), "test")[indices]
    evaluated = scaled(raw, card["temperature"])
    for answer, log_p, uncertainty in zip(Run(finished_run).predict(files), evaluated, entropy(evaluated), strict=True):
        assert answer["probabilities"] == pytest.approx(np.exp(log_p).tolist(), abs=1e-6)
        assert answer["label"] == int(log_p.argmax())
        assert answer["class_name"] == card["classes"][answer["label"]]
        assert answer["entropy"] == pytest.approx(float(uncertainty), abs=1e-6)
        assert answer["normalized_entropy"] == pytest.approx(float(uncertainty) / np.log(10), abs=1e-6)
        assert answer["abstain"] == (uncertainty > card["abstention"]["threshold"])


def test_answers_come_in_the_order_of_the_files(finished_run: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.png" for name in "ba"]
    for index, file in enumerate(files):
        write_sample("mnist5k", index, file, None)
    both = Run(finished_run).predict(files)
    assert [answer["image"] for answer in both] == [str(file) for file in files]
    alone = Run(finished_run).predict([files[1]])[0]
    assert alone["probabilities"] == pytest.approx(both[1]["probabilities"], abs=1e-6)


def test_a_sample_is_the_held_out_row_to_the_pixel(tmp_path: Path) -> None:
    path = tmp_path / "new" / "seven.png"
    shows = write_sample("mnist5k", 123, path, None)
    test = load("mnist5k").test
    assert np.array_equal(read_image(path, (1, 28, 28)), test.images[123])
    assert shows == f"class {test.labels[123]}"


def test_a_sample_of_glyphs_is_the_out_of_distribution_row(tmp_path: Path) -> None:
    assert write_sample("glyphs", 3, tmp_path / "letter.png", None) == "out of distribution"
    assert np.array_equal(read_image(tmp_path / "letter.png", (1, 28, 28)), draw_glyphs(4, (1, 28, 28))[3])


@pytest.mark.parametrize(("name", "index", "part"), [("mnist5", 0, "unknown data set"), ("mnist5k", 1000, "1000")])
def test_a_sample_that_does_not_exist_is_refused(tmp_path: Path, name: str, index: int, part: str) -> None:
    with pytest.raises(FedPPDError, match=part):
        write_sample(name, index, tmp_path / "x.png", None)
    assert not (tmp_path / "x.png").exists()


def test_an_image_is_greyed_and_resized_to_the_models_input(tmp_path: Path) -> None:
    Image.new("RGBA", (56, 40), (255, 255, 255, 255)).save(tmp_path / "white.png")
    pixels = read_image(tmp_path / "white.png", (1, 28, 28))
    assert pixels.shape == (1, 28, 28)
    assert (pixels == 255).all()


def test_a_colour_image_keeps_its_channels_in_order(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), (10, 20, 30)).save(tmp_path / "colour.png")
    pixels = read_image(tmp_path / "colour.png", (3, 32, 32))
    assert [int(channel[0, 0]) for channel in pixels] == [10, 20, 30]


def test_16_bits_are_scaled_and_orientation_is_followed(tmp_path: Path) -> None:
    ramp = np.arange(784, dtype=np.uint16).reshape(28, 28) * 80
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    assert np.abs(read_image(tmp_path / "deep.png", (1, 28, 28))[0] - ramp / 257).max() <= 0.5
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray((ramp // 257).astype(np.uint8)).save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(read_image(tmp_path / "turned.png", (1, 28, 28))[0], np.rot90(ramp // 257, 2))


@pytest.mark.parametrize(
    ("image", "named"),
    [
        (Image.new("RGBA", (28, 28), (255, 255, 255, 10)), "transparent"),
        (Image.new("F", (28, 28), 0.5), "'F'"),
        (Image.new("I", (28, 28), 70_000), "16 bits"),
    ],
    ids=["transparent", "floats", "32 bits"],
)
def test_what_cannot_be_shown_without_guessing_is_refused_by_name(
    tmp_path: Path, image: Image.Image, named: str
) -> None:
    image.save(tmp_path / "image.tiff")
    with pytest.raises(ConfigError, match=named):
        read_image(tmp_path / "image.tiff", (1, 28, 28))


def cut_png(path: Path) -> None:
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(0, 255, (64, 64)).astype(np.uint8)).save(path, format="PNG")
    path.write_bytes(path.read_bytes()[:-2000])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: path.write_text("not an image"), id="text"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(Path.mkdir, id="a folder"),
        pytest.param(lambda path: None, id="missing"),
        pytest.param(cut_png, id="cut short"),
        pytest.param(lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50), id="a PNG's beginning"),
    ],
)
def test_a_file_that_is_no_image_is_refused_in_one_line(finished_run: Path, tmp_path: Path, make: object) -> None:
    path = tmp_path / "picture.png"
    make(path)  # type: ignore[operator]
    with pytest.raises(ConfigError) as caught:
        Run(finished_run).predict([path])
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
