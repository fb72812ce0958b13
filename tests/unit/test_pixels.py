"""Images as they come: decoded right or refused by name, and the same for training and predict."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from fedppd_ray.config.file import load_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.holdings import Holdings, prepare_data
from fedppd_ray.data.pixels import WORDS, Wanted
from fedppd_ray.data.readers.pixels import decode
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.federation.observer import Observer
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.runs.run import Run
from fedppd_ray.runtime.driver import train

GENERATOR = np.random.Generator(np.random.PCG64(0))
GREY16 = GENERATOR.integers(0, 65536, (12, 10), dtype=np.uint16)
GREY8 = GENERATOR.integers(0, 256, (12, 10), dtype=np.uint8)


def saved(path: Path, pixels: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)
    return path


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_stay_sixteen_bits(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path / f"x{suffix}", GREY16)
    found = decode(path, Wanted((1, 12, 10), WORDS))
    assert found.dtype == np.uint16
    assert np.array_equal(found[0], GREY16)
    with pytest.raises(DataError, match=r"of 16 bits, and the others' are of 8 bits"):
        decode(path, Wanted((1, 12, 10)))


def test_a_picture_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90° to the right
    path = saved(tmp_path / "x.png", GREY8, exif=exif)
    assert np.array_equal(decode(path, Wanted((1, 10, 12)))[0], np.rot90(GREY8, -1))


def test_transparency_is_dropped_where_there_is_none_kept_as_a_channel_or_refused(tmp_path: Path) -> None:
    colours = GENERATOR.integers(0, 256, (12, 10, 4), dtype=np.uint8)
    opaque = colours.copy()
    opaque[..., 3] = 255
    assert np.array_equal(
        decode(saved(tmp_path / "a.png", opaque), Wanted((3, 12, 10))), opaque[..., :3].transpose(2, 0, 1)
    )
    path = saved(tmp_path / "b.png", colours)
    assert np.array_equal(decode(path, Wanted((4, 12, 10))), colours.transpose(2, 0, 1))
    with pytest.raises(DataError, match=r"has transparent pixels.*flatten it onto the background"):
        decode(path, Wanted((3, 12, 10)))


def test_other_sizes_are_refused_unless_resizing_is_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.png", GREY16)
    with pytest.raises(DataError, match=r"12×10 pixels where the others have 6×5; .*data.resize: \[6, 5\]"):
        decode(path, Wanted((1, 6, 5), WORDS))
    small = decode(path, Wanted((1, 6, 5), WORDS, resize=True))
    assert (small.shape, small.dtype) == ((1, 6, 5), np.uint16)
    assert small.max() > 255


def test_arrays_of_floats_must_be_within_the_stated_range(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.linspace(-1000, 2000, 120, dtype=np.float32).reshape(12, 10))
    assert decode(tmp_path / "x.npy", Wanted((1, 12, 10), (-1024.0, 3071.0))).min() == -1000
    with pytest.raises(DataError, match="values from -1000 to 2000 are not within 0 to 1"):
        decode(tmp_path / "x.npy", Wanted((1, 12, 10), (0.0, 1.0)))
    np.save(tmp_path / "nan.npy", np.full((12, 10), np.nan, np.float32))
    with pytest.raises(DataError, match=r"are not within"):
        decode(tmp_path / "nan.npy", Wanted((1, 12, 10), (0.0, 1.0)))


def test_a_dicom_file_is_rescaled_and_windowed(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    data.Rows, data.Columns, data.SamplesPerPixel = 1, 5, 1
    data.PhotometricInterpretation = "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 16
    data.HighBit, data.PixelRepresentation = 15, 0
    data.RescaleSlope, data.RescaleIntercept = 1, -1024
    data.WindowCenter, data.WindowWidth = 40, 400
    stored = np.array([[0, 864, 1064, 1264, 4000]], np.uint16)  # −1024, −160, 40, 240, 2976 HU
    data.PixelData = stored.tobytes()
    data.save_as(tmp_path / "x.dcm", enforce_file_format=True)
    found = decode(tmp_path / "x.dcm", Wanted((1, 1, 5), (0.0, 1.0)))[0, 0]
    assert found == pytest.approx([0, 0, 0.5, 1, 1], abs=0.01)


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """16-bit scans of two classes: dark and bright."""
    generator = np.random.Generator(np.random.PCG64(1))
    for part, count in (("train", 24), ("test", 8)):
        for name, low in (("clear", 0), ("dense", 40_000)):
            for number in range(count):
                pixels = generator.integers(low, low + 20_000, (20, 18), dtype=np.uint16)
                saved(tmp_path / "scans" / part / name / f"{number:02d}.png", pixels)
    return tmp_path / "scans"


def config_for(root: Path, **data: Any) -> Config:
    path = root.parent / "config.yaml"
    values = {
        "data": {"name": "folder", "root": str(root), "partition": {"kind": "iid"}, "calibration": 8, **data},
        "federation": {"clients": 2, "rounds": 2},
        "client": {"epochs": 2, "batch_size": 10},
        "evaluation": {"ood": None},
    }
    path.write_text(yaml.safe_dump(values))
    return load_config(path)


def test_sixteen_bit_scans_of_an_odd_size_train_and_predict_as_they_were_evaluated(scans: Path) -> None:
    config = config_for(scans)
    assert config.dataset.range == (0, 65535)
    assert config.dataset.network("student") == "small_student"
    shard = ImageShard(load("folder", str(scans), config.dataset).train.images, None, config.dataset)
    inputs = shard.inputs(torch.arange(len(shard)))
    assert float(inputs.mean()) == pytest.approx(0, abs=1e-3)
    assert float(inputs.std()) == pytest.approx(1, abs=1e-2)
    train(config, scans.parent / "run", Observer(), serial=True)
    run = Run(scans.parent / "run")
    paths = sorted((scans / "test").glob("*/*.png"))
    answers = run.predict(paths)
    held_out = HeldOut(config)
    right = [answer["label"] == label for answer, label in zip(answers, held_out.labels("test"), strict=True)]
    assert 100 * np.mean(right) == pytest.approx(run.evaluate()["accuracy"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"no image"), "07.png: cannot be read as an image"),
        (lambda path: saved(path, GREY16), "07.png: 12×10 pixels where the others have 20×18"),
        (lambda path: saved(path, np.zeros((20, 18), np.uint8)), "07.png: pixels are of 8 bits"),
    ],
)
def test_a_bad_file_is_named_before_the_first_round_or_left_out_and_counted(
    scans: Path, spoil: Callable[[Path], object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(scans / "train/dense/07.png")
    with pytest.raises(DataError, match=rf"{message}.*data.skip_bad_files: true"):
        config_for(scans)
    config = config_for(scans, skip_bad_files=True)
    with caplog.at_level(logging.WARNING):
        prepare_data(config)
    assert "train: 1 files left out" in caplog.text
    assert len(load("folder", str(scans), config.dataset).train) == 47


def test_mixed_sizes_are_brought_to_one_where_that_is_said(scans: Path) -> None:
    saved(scans / "train/dense/07.png", GREY16)
    config = config_for(scans, resize=[16, 16])
    assert config.dataset.shape == (1, 16, 16)
    assert load("folder", str(scans), config.dataset).train.images.shape == (48, 1, 16, 16)
    with pytest.raises(ConfigError, match=r"data\.resize"):
        load_config("quickstart", {"data.resize": [3, 3]})


def test_a_bad_file_on_a_clients_own_node_names_the_client(scans: Path) -> None:
    facts = config_for(scans).data.folder
    assert facts is not None
    own = scans.parent / "own"
    saved(own / "clear/1.png", GREY16)
    path = scans.parent / "config.yaml"
    config = load_config(path, {"clients": {"client-01": {"data": str(own)}}})
    with pytest.raises(DataError, match=r"client-01: a file: 12×10 pixels"):
        Holdings(config, ["client-01"]).of("client-01")


def test_what_is_held_against_sixteen_bits_spans_sixteen_bits(scans: Path) -> None:
    path = scans.parent / "config.yaml"
    config_for(scans)
    changes = {"evaluation.ood": ["glyphs", "noise"], "evaluation.score": "auto"}
    held_out = HeldOut(load_config(path, changes))
    for split in ("ood/glyphs", "ood/noise", "outliers"):
        found = held_out.images(split)
        assert found.shape[1:] == (1, 20, 18)
        assert 30_000 < found.max() <= 65_535, split
    with pytest.raises(ConfigError, match=r"evaluation\.corruptions: they are made of 8-bit images"):
        load_config(path, {"evaluation.corruptions": True})
