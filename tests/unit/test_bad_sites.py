"""What can be wrong with a site's own rows: found on its node before the first round, in one message with remedy."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.errors import DataError
from fedppd_ray.workers.client import ClientWorker

CLASSES = ["clear", "dense", "void"]
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "cache"))


def config_for(site: Path, **data: Any) -> Config:
    """client-01 has a folder of its own, on a node that knows the facts and nothing else."""
    folder = {"classes": CLASSES, "shape": [1, 6, 5], "mean": [0.5], "std": [0.5]}
    values = {
        "data": {"name": "folder", "folder": folder, "partition": {"kind": "iid"}, **data},
        "federation": {"clients": 2},
        "evaluation": {"ood": None},
        "clients": {"client-01": {"data": str(site)}},
    }
    return parse_config(values)


def table_config(site: Path) -> Config:
    columns = [{"name": "age", "kind": "numeric"}, {"name": "ward", "kind": "categorical", "categories": ["a", "b"]}]
    table = {"target": "y", "classes": ["ill", "well"], "columns": columns}
    values = {
        "data": {"name": "table", "table": table, "partition": {"kind": "iid"}},
        "federation": {"clients": 2},
        "evaluation": {"ood": None},
        "clients": {"client-01": {"data": str(site)}},
    }
    return parse_config(values)


def pictures(site: Path, count: int = 4) -> Path:
    for name in CLASSES:
        (site / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(RANDOM.integers(0, 256, (6, 5), dtype=np.uint8)).save(site / name / f"{number}.png")
    return site


def arrays(site: Path, labels: Any, shape: tuple[int, ...] = (6, 5), kind: Any = np.uint8) -> Path:
    site.mkdir()
    np.save(site / "images.npy", np.zeros((len(labels), *shape), kind))
    np.save(site / "labels.npy", np.asarray(labels, np.int64))
    return site


def table(site: Path, text: str) -> Path:
    site.write_text(text)
    return site


def describe(config: Config) -> list[Any]:
    """What an executor asks for before the first round."""
    return ClientWorker(config, ["client-01"]).describe()


def check(config: Config, says: str, home: Path) -> None:
    """The client is named to everybody, the file to the client's own people."""
    with pytest.raises(DataError, match=r"^client-01: ") as raised:
        describe(config)
    assert str(home) not in str(raised.value)
    assert re.search(says, (home / "cache" / "clients.log").read_text(), re.DOTALL)
    remedies = "mend|convert|resize|skip_bad|give|missing|classes are|must|header|expected|cannot"
    assert re.search(remedies, str(raised.value))


def spoil_picture(site: Path) -> Path:
    (pictures(site) / "dense/2.png").write_bytes(b"\x89PNG broken")
    return site


def other_size(site: Path) -> Path:
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(pictures(site) / "dense/2.png")
    return site


def other_class(site: Path) -> Path:
    (pictures(site) / "odd").mkdir()
    return site


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (spoil_picture, r"dense/2.png: cannot be read as an image .*data.skip_bad_files: true leaves"),
        (other_size, r"dense/2.png: 9×9 pixels where the others have 6×5; .*data.resize: \[6, 5\]"),
        (other_class, r"odd: a folder of no class; the classes are clear, dense, void"),
        (lambda site: arrays(site, [0, 1, 7]), r"labels.npy: labels must be 0 to 2, and row 2 has 7; mend it"),
        (lambda site: arrays(site, [0, -1]), r"labels.npy: labels must be 0 to 2, and row 1 has -1"),
        (lambda site: arrays(site, [0, 1], (7, 5)), r"images.npy: uint8 \(2, 7, 5\), expected uint8 N×6×5 .*convert"),
        (lambda site: arrays(site, [0, 1], kind=np.uint16), r"images.npy: uint16 .*, expected uint8 N×6×5"),
        (lambda site: arrays(site, []), r"images.npy: uint8 \(0, 6, 5\), expected"),
        (lambda site: site, r"images.npy and labels.npy cannot be read here"),
    ],
)
def test_a_folder_that_cannot_be_used_names_site_file_and_remedy(
    tmp_path: Path, make: Callable[[Path], Path], says: str
) -> None:
    check(config_for(make(tmp_path / "site")), rf"(site: |site/){says}", tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "age,ward,y\n61,a,ill\n50,b,dead\n",
            r"row 2, column 'y': 'dead' is none of ill, well; mend or remove the row",
        ),
        ("age,ward,y\nold,a,ill\n", r"row 1, column 'age': 'old' is not a number; mend it, or leave it empty"),
        ("age,y\n61,ill\n", r"column 'ward' is missing"),
        ("age,ward\n61,a\n", r"the target column 'y' is missing"),
        ("age,ward,y\n61,a,ill,7\n", r"line 2 has 4 values, the header 3"),
        ("age,ward,y\n", r"holds no row; give it some"),
        ("", r"is empty; its first line must name the columns"),
    ],
)
def test_a_table_that_cannot_be_used_names_site_file_row_and_remedy(tmp_path: Path, text: str, says: str) -> None:
    check(table_config(table(tmp_path / "site.csv", text)), rf"site.csv: {says}", tmp_path)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([0, 0, 1], "holds 3 rows only: .*give it more, or leave it out; has no row of 'void'"),
        ([1] * 30, "all of its rows are 'dense': .*client.label_shift"),
        ([0, 1] * 15, "has no row of 'void'"),
    ],
)
def test_few_rows_one_class_or_a_class_that_lacks_are_told_and_trained_on(
    tmp_path: Path, labels: list[int], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        (info,) = describe(config_for(arrays(tmp_path / "site", labels)))
    assert info.rows == len(labels)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("client-01: ")
    assert re.search(says, message)


def test_bad_files_are_skipped_and_counted_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        (info,) = describe(config_for(spoil_picture(tmp_path / "site"), skip_bad_files=True))
    assert info.rows == 11
    assert "1 files left out" in caplog.text


def test_rows_of_a_folder_are_mapped_not_copied_into_each_worker(tmp_path: Path) -> None:
    """224×224 pictures of a node are one file in its page cache, whoever reads them."""
    from fedppd_ray.data.folder import read_folder

    for site in (arrays(tmp_path / "arrays", [0, 1]), pictures(tmp_path / "pictures")):
        images = read_folder(site, config_for(site).dataset).images
        base = images
        while base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)
        assert not images.flags.owndata
