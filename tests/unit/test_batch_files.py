"""A batch job's inputs are cut without loss: what the parts hold together is what the file holds."""

import csv
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedppd_ray.data.batch_files import boundaries, columns_of, files_in, images_of, kind_of, pictures_of
from fedppd_ray.data.encoding import parse_csv
from fedppd_ray.errors import DataError

CELLS = st.text(st.sampled_from('ab,"\n\r é1'), max_size=6).map(lambda text: text.strip() or "x")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=20),
    size=st.integers(1, 7),
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    name=st.sampled_from(["b", 'b "two\nlines"']),
)
def test_parts_of_a_csv_file_hold_its_rows(
    tmp_path: Path, rows: list[tuple[str, str]], size: int, end: str, bom: bool, name: str
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([("a", name), *rows])
    path = tmp_path / "x.csv"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + text.getvalue().encode())
    whole = parse_csv(text.getvalue(), "x")
    parts = list(boundaries(path, "csv", size))
    assert [stop - start for start, stop, _ in parts] == [
        min(size, len(rows) - start) for start in range(0, len(rows), size)
    ]
    found = [columns_of(path, "csv", start, stop, at, "x") for start, stop, at in parts]
    assert {key: np.concatenate([part[key] for part in found]).tolist() for key in whole} == {
        key: values.tolist() for key, values in whole.items()
    }


def test_a_quote_that_is_never_closed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,"2\n3,4\n')
    with pytest.raises(DataError, match="never closed"):
        list(boundaries(path, "csv", 10))


@pytest.mark.parametrize("group", [3, 7, 100])
def test_parts_of_a_parquet_file_hold_its_rows_whatever_its_groups(tmp_path: Path, group: int) -> None:
    path = tmp_path / "x.parquet"
    frame = pd.DataFrame({"age": [float(row) if row % 5 else None for row in range(20)], "ward": ["a", None] * 10})
    frame.to_parquet(path, row_group_size=group)
    parts = list(boundaries(path, "parquet", 6))
    assert [(start, stop) for start, stop, _ in parts] == [(0, 6), (6, 12), (12, 18), (18, 20)]
    found = [columns_of(path, "parquet", start, stop, at, "x") for start, stop, at in parts]
    ages = [value for part in found for value in part["age"].tolist()]
    assert ages == [f"{row}.0" if row % 5 else None for row in range(20)]
    assert [value for part in found for value in part["ward"].tolist()] == ["a", None] * 10


def test_arrays_and_folders_are_cut_too(tmp_path: Path) -> None:
    rows = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (5, 4, 4), np.uint8)
    np.save(tmp_path / "rows.npy", rows)
    folder = tmp_path / "images"
    folder.mkdir()
    for number, row in enumerate(rows):
        Image.fromarray(row).save(folder / f"{number}.png")
    for path, kind in ((tmp_path / "rows.npy", "npy"), (folder, "folder")):
        assert kind_of(path, tables=False) == kind
        cut = list(boundaries(path, kind_of(path, tables=False), 2))
        assert [(start, stop) for start, stop, _ in cut] == [(0, 2), (2, 4), (4, 5)]
        found = [pictures_of(path, kind_of(path, False), a, b, (1, 4, 4), (0.0, 255.0)) for a, b, _ in cut]
        assert (np.concatenate(found)[:, 0] == rows).all()


def test_a_folder_of_tables_is_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "notes.txt"):
        (tmp_path / name).write_text("x\n1\n")
    assert [path.name for path in files_in([tmp_path], tables=True)] == ["a.csv", "b.csv"]


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "wide.npy", np.zeros((2, 5, 5)))
    np.save(tmp_path / "high.npy", np.full((2, 4, 4), 256.0))
    np.save(tmp_path / "nan.npy", np.full((2, 4, 4), np.nan))
    (tmp_path / "empty").mkdir()
    wanted = ((1, 4, 4), (0.0, 255.0))
    with pytest.raises(DataError, match="no such file"):
        list(files_in([tmp_path / "missing"], tables=True))
    with pytest.raises(DataError, match="CSV or Parquet"):
        kind_of(tmp_path / "wide.npy", tables=True)
    with pytest.raises(DataError, match=r"\.npy"):
        list(boundaries(tmp_path / "objects.npy", "npy", 10))
    with pytest.raises(DataError, match="N×4×4"):
        pictures_of(tmp_path / "wide.npy", "npy", 0, 2, *wanted)
    for name in ("high", "nan"):
        with pytest.raises(DataError, match="0–255"):
            pictures_of(tmp_path / f"{name}.npy", "npy", 0, 2, *wanted)
    with pytest.raises(DataError, match="no images"):
        images_of(tmp_path / "empty")
