"""A table's file as columns of text: CSV, or Parquet where pyarrow is installed."""

from pathlib import Path

from fedppd_ray.data.encoding import Columns, as_texts, parse_csv
from fedppd_ray.errors import DataError

SUFFIXES = (".csv", ".parquet")


def find(folder: Path, stem: str) -> Path | None:
    """FOLDER/stem.csv or .parquet, whichever is there."""
    return next((path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").is_file()), None)


def read(path: Path) -> Columns:
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        return parse_csv(path.read_text(encoding="utf-8-sig"), str(path))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"{path}: cannot be read as a table ({' '.join(str(error).split())[:200]})") from None


def _parquet(path: Path) -> Columns:
    import pandas as pd  # here, because it takes half a second

    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise DataError(
            f"{path}: Parquet is read by pyarrow; pip install 'fedppd-ray[parquet]', or write CSV"
        ) from None
    texts = frame.map(lambda value: "" if pd.isna(value) else str(value))
    return {str(name).strip(): as_texts(texts[name].tolist()) for name in texts.columns}
