"""`fedppd predict … --out DIR`: a batch job, with a bar on a terminal and lines elsewhere."""

import enum
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("fedppd")

_LINE_SECONDS = 30.0


class BatchFormat(enum.StrEnum):
    PARQUET = "parquet"
    CSV = "csv"


def predict_batch(
    run: str,
    inputs: Sequence[Path],
    out: Path,
    form: BatchFormat,
    part_rows: int,
    coverage: float | None,
    confidence: float | None,
    address: str | None,
    serial: bool,
) -> None:
    from fedppd_ray.api import predict_files
    from fedppd_ray.cli.console import fail

    began = time.monotonic()
    try:
        with _shown() as (started, progress):
            rows = predict_files(
                run,
                inputs,
                out,
                form=form.value,
                part_rows=part_rows,
                coverage=coverage,
                confidence=confidence,
                address=address,
                serial=serial,
                started=started,
                progress=progress,
            )
    except KeyboardInterrupt:
        fail(f"stopped; what is written stays in {out}, and the same command continues", 130)
    print(f"{rows:,} rows in {out}  ({time.monotonic() - began:.1f} s)")


Shown = tuple[Callable[[int, int], None], Callable[[int], None]]


@contextmanager
def _shown() -> Iterator[Shown]:
    """Functions that are told how many rows there are, and of every part that is written."""
    if not sys.stdout.isatty():
        yield _lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("[bold]rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("rows", total=None)
        yield (
            lambda done, rows: bar.update(task, completed=done, total=rows),
            lambda rows: bar.advance(task, rows),
        )


def _lines() -> Shown:
    done, total, said = 0, 0, time.monotonic()

    def started(before: int, rows: int) -> None:
        nonlocal done, total
        done, total = before, rows
        log.info("%s rows to predict, %s of them are there already", f"{rows:,}", f"{before:,}")

    def progress(rows: int) -> None:
        nonlocal done, said
        done += rows
        if time.monotonic() - said > _LINE_SECONDS:
            said = time.monotonic()
            log.info("%s of %s rows", f"{done:,}", f"{total:,}")

    return started, progress
