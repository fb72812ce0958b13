"""Answers for millions of rows: input files cut into parts, a file of answers for each, so that a job can be resumed.

No Ray here: a part is work for anyone who has the student. `runtime/batch.py` has many do it at once.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedppd_ray.data.batch_files import FileKind, boundaries, columns_of, files_in, images_of, kind_of, pictures_of
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.inference.abstention import abstention_level
from fedppd_ray.inference.conformal import conformal_level
from fedppd_ray.inference.student import Student
from fedppd_ray.runs.files import make_folder, write_atomically, write_json

PLAN = "_batch.json"  # readers of a folder of Parquet files leave out what begins so
Format = Literal["parquet", "csv"]


@dataclass(frozen=True)
class Part:
    """Rows of one input file, from `start` to `stop`; `at` is where they begin and end in bytes, of a CSV file.

    Of a folder of images, the rows are its files in order of their names.
    """

    number: int
    source: str
    kind: FileKind
    start: int
    stop: int
    at: tuple[int, int] = (0, 0)

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Asked:
    """Another share of answered rows than the export's default, and sets of classes of this confidence."""

    coverage: float | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class Job:
    """All that an executor needs: where the student is, what is to be done, and where the answers go."""

    run: str
    out: str
    format: Format
    asked: Asked
    parts: tuple[Part, ...]
    finished: tuple[int, ...]  # parts that an earlier attempt has written

    @property
    def waiting(self) -> list[Part]:
        done = set(self.finished)
        return [part for part in self.parts if part.number not in done]


def plan_job(
    run: str, card: dict[str, Any], inputs: Sequence[Path], out: Path, form: Format, asked: Asked, size: int
) -> Job:
    """Cut the inputs; a folder that holds answers of the same job already is continued, any other is refused."""
    if size < 1:
        raise ConfigError("--part-rows: must be 1 or more")
    # Before anything is written: these raise for what the card does not offer.
    abstention_level(card, asked.coverage)
    conformal_level(card, asked.confidence)
    parts = tuple(_parts(inputs, "table" in card, size))
    if not parts:
        raise DataError(f"{', '.join(map(str, inputs))}: no rows to predict")
    facts = {
        "version": card["version"],
        "sha256": card["sha256"],
        "format": form,
        "coverage": asked.coverage,
        "confidence": asked.confidence,
        "part_rows": size,
        "inputs": [_identity(Path(source)) for source in dict.fromkeys(part.source for part in parts)],
    }
    make_folder(out)
    _same_or_new(out, facts)
    finished = tuple(part.number for part in parts if part_file(out, part.number, form).exists())
    return Job(run, str(out), form, asked, parts, finished)


def part_file(out: Path, number: int, form: Format) -> Path:
    return out / f"part-{number:06d}.{form}"


def _parts(inputs: Sequence[Path], tables: bool, size: int) -> Iterator[Part]:
    number = 0
    for path in files_in(inputs, tables):
        kind = kind_of(path, tables)
        for start, stop, at in boundaries(path, kind, size):
            yield Part(number, str(path.resolve()), kind, start, stop, at)
            number += 1


def _identity(path: Path) -> dict[str, Any]:
    """What would change if the file did. A folder's files are too many to look into: their names and sizes do."""
    if path.is_dir():
        sizes = [[file.name, file.stat().st_size] for file in images_of(path)]
        return {"path": str(path), "files": sizes}
    status = path.stat()
    return {"path": str(path), "size": status.st_size, "modified": status.st_mtime_ns}


def _same_or_new(out: Path, facts: dict[str, Any]) -> None:
    path = out / PLAN
    if not path.exists():
        if any(out.iterdir()):
            raise ConfigError(f"--out {out}: holds something else already; name a new folder")
        write_json(path, facts)
        return
    try:
        known = json.loads(path.read_bytes())
    except ValueError:
        raise ConfigError(f"{path}: is not readable; name a new folder") from None
    other = next((key for key in facts if known.get(key) != facts[key]), None)
    if other is not None:
        raise ConfigError(
            f"--out {out}: holds answers of another job (its {other} differs); name a new folder, or remove this one"
        )


def do_part(student: Student, job: Job, part: Part) -> int:
    """Predict one part and write its file, whole or not at all; returns its rows."""
    answers = _answers(student, job, part)
    content = _as_parquet(answers) if job.format == "parquet" else _as_csv(answers)
    write_atomically(part_file(Path(job.out), part.number, job.format), content)
    return len(answers)


def _answers(student: Student, job: Job, part: Part) -> list[dict[str, Any]]:
    path = Path(part.source)
    where = f"{path}, rows {part.start + 1} to {part.stop}"
    if student.table is not None:
        columns = columns_of(path, part.kind, part.start, part.stop, part.at, where)
        if len(next(iter(columns.values()))) != part.rows:
            raise DataError(f"{where}: lines end in more than one way, or within a row; save the file anew")
        found = student.predict_table(columns, job.asked.coverage, where, confidence=job.asked.confidence)
    else:
        rows = pictures_of(path, part.kind, part.start, part.stop, student.shape, student.range)
        found = student.predict(rows, job.asked.coverage, job.asked.confidence)
    if part.kind == "folder":
        return [
            {"source": str(path), "file": file.name, **answer}
            for file, answer in zip(images_of(path)[part.start : part.stop], found, strict=True)
        ]
    return [{"source": str(path), "row": row, **answer} for row, answer in enumerate(found, part.start + 1)]


def _as_parquet(answers: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(answers), buffer, compression="zstd")
    return buffer.getvalue()


def _as_csv(answers: list[dict[str, Any]]) -> bytes:
    """A column per class; lists of names with semicolons between them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    flat = [_flat(answer) for answer in answers]
    writer.writerow(flat[0])
    writer.writerows(row.values() for row in flat)
    return text.getvalue().encode()


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in answer.items():
        if key == "probabilities":
            row |= {f"probability_{number}": share for number, share in enumerate(value)}
        elif isinstance(value, list):
            row[key] = ";".join(map(str, value))
        else:
            row[key] = int(value) if isinstance(value, bool) else value
    return row
