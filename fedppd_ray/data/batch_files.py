"""Large input files of a batch job: how many rows they hold, and any stretch of them without reading the rest."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.nouns import Shape
from fedppd_ray.data.encoding import Columns, as_texts, parse_csv
from fedppd_ray.data.parts import RawRows
from fedppd_ray.data.pictures import picture_rows
from fedppd_ray.errors import DataError

FileKind = Literal["csv", "parquet", "npy", "folder"]
Stretch = tuple[int, int, tuple[int, int]]  # first row, row behind the last, and their bytes

PICTURES = frozenset((".png", ".jpg", ".jpeg", ".tif", ".tiff", ".dcm"))
_TABLES = (".csv", ".parquet")
_TYPES = "uint8, uint16 or float"


def files_in(inputs: Sequence[Path], tables: bool) -> Iterator[Path]:
    """The inputs; of a folder that holds tables or arrays, its files in order of their names."""
    wanted = _TABLES if tables else (".npy",)
    for path in inputs:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        inner = sorted(file for file in path.iterdir() if file.suffix in wanted) if path.is_dir() else []
        yield from inner or [path]


def kind_of(path: Path, tables: bool) -> FileKind:
    if path.is_dir() and not tables:
        return "folder"
    if tables and path.suffix in _TABLES:
        return "csv" if path.suffix == ".csv" else "parquet"
    if not tables and path.suffix == ".npy":
        return "npy"
    takes = "CSV or Parquet files" if tables else ".npy files of N×H×W[×C] values, or folders of images"
    raise DataError(f"{path}: a batch job of this student takes {takes}")


def boundaries(path: Path, kind: FileKind, size: int) -> Iterator[Stretch]:
    """Stretches of at most `size` rows."""
    if kind == "csv":
        yield from _csv_boundaries(path, size)
        return
    rows = _rows(path, kind)
    for start in range(0, rows, size):
        yield start, min(start + size, rows), (0, 0)


def _rows(path: Path, kind: FileKind) -> int:
    if kind == "npy":
        return len(_array(path))
    return int(_parquet(path).metadata.num_rows) if kind == "parquet" else len(images_of(path))


def _csv_boundaries(path: Path, size: int) -> Iterator[Stretch]:
    """One look at every line. A line that ends within quotes is not the end of a row."""
    with path.open("rb") as file:
        _skip_row(file)
        rows, start, begin = 0, 0, file.tell()
        position, quotes = begin, 0
        for line in file:
            position += len(line)
            quotes += line.count(b'"')
            if quotes % 2 or not line.strip():
                continue
            rows += 1
            if rows - start == size:
                yield start, rows, (begin, position)
                start, begin = rows, position
        if quotes % 2:
            raise DataError(f"{path}: a quote is opened and never closed")
        if rows > start:
            yield start, rows, (begin, position)


def _skip_row(file: Any) -> bytes:
    """The first row: the names of the columns."""
    head: bytes = file.readline()
    while head.count(b'"') % 2 and (more := file.readline()):
        head += more
    return head


def columns_of(path: Path, kind: FileKind, start: int, stop: int, at: tuple[int, int], where: str) -> Columns:
    """Rows of a table, as text."""
    if kind == "parquet":
        return _parquet_columns(path, start, stop)
    with path.open("rb") as file:
        head = _skip_row(file)
        file.seek(at[0])
        content = head.rstrip(b"\r\n") + b"\n" + file.read(at[1] - at[0])
    try:
        return parse_csv(content.decode("utf-8-sig"), where)
    except UnicodeDecodeError:
        raise DataError(f"{where}: is not UTF-8 text; save it as UTF-8") from None


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path}: Parquet is read by pyarrow; pip install 'fedppd-ray[parquet]'") from None
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({' '.join(str(error).split())[:200]})") from None


def _parquet_columns(path: Path, start: int, stop: int) -> Columns:
    """Reads the row groups that hold these rows, and no others."""
    import pyarrow as pa

    file = _parquet(path)
    first, pieces = 0, []
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first < stop and first + rows > start:
            table = file.read_row_group(group)
            pieces.append(table.slice(max(0, start - first), min(stop, first + rows) - max(start, first)))
        first += rows
    joined = pa.concat_tables(pieces)
    return {name.strip(): _texts(joined.column(name).to_pylist()) for name in joined.column_names}


def _texts(values: list[Any]) -> NDArray[Any]:
    return as_texts(["" if value is None or value != value else str(value) for value in values])


def pictures_of(path: Path, kind: FileKind, start: int, stop: int, shape: Shape, span: tuple[float, float]) -> RawRows:
    """Rows × channels × height × width, of an array's rows or a folder's files."""
    if kind == "folder":
        return picture_rows(images_of(path)[start:stop], shape, span)
    channels, height, width = shape
    sides = (height, width) if channels == 1 else (height, width, channels)
    array = _array(path)
    if array.shape[1:] != sides:
        given = "×".join(map(str, array.shape))
        raise DataError(f"{path}: the array is {given}; this student takes N×{'×'.join(map(str, sides))}")
    values = np.array(array[start:stop])
    low, high = values.min(), values.max()
    if not (low >= span[0] and high <= span[1]):  # NaN compares false with everything
        raise DataError(
            f"{path}, rows {start + 1} to {stop}: values are from {low:g} to {high:g}; they must be within "
            f"{span[0]:g}–{span[1]:g}"
        )
    rows = values[:, None] if channels == 1 else values.transpose(0, 3, 1, 2)
    return rows if rows.dtype == np.uint8 else rows.astype(np.float32)


def _array(path: Path) -> NDArray[Any]:
    """Mapped into memory, never unpickled."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is not a readable .npy file ({' '.join(str(error).split())[:200]})") from None
    if array.dtype not in (np.uint8, np.uint16, np.float16, np.float32, np.float64) or array.ndim < 1:
        raise DataError(f"{path}: holds {array.dtype}; give {_TYPES}")
    return array


@lru_cache(maxsize=4)
def images_of(folder: Path) -> tuple[Path, ...]:
    """A folder's images in order of their names; those of folders within it are not looked for."""
    found = tuple(sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES))
    if not found:
        raise DataError(f"{folder}: holds no images ({', '.join(sorted(PICTURES))})")
    return found
