"""A batch job on Ray Data: a pool of actors, each with the student, takes one part after the other."""

import logging
from collections.abc import Callable
from typing import Any

import ray
import ray.data
import torch

from fedppd_ray.errors import DataError, FedPPDError, ResourceError
from fedppd_ray.runs.batch import Job, do_part
from fedppd_ray.runs.export import load_student
from fedppd_ray.runtime.driver import connect

# Blocks of parts; more of them would only keep the scheduler busy.
_MOST_BLOCKS = 4096


class PartWorker:
    """Holds the student in one process; a batch is the number of a part."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self._job = job
        self._parts = {part.number: part for part in job.parts}
        self._student = load_student(job.run)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        rows, errors = [], []
        for number in batch["item"].tolist():
            try:
                rows.append(do_part(self._student, self._job, self._parts[number]))
                errors.append("")
            except FedPPDError as error:  # the user's to mend: as a word, not as a stack trace of four processes
                rows.append(0)
                errors.append(str(error))
        return {"rows": rows, "error": errors}


def run_job(job: Job, progress: Callable[[int], None], address: str | None = None) -> None:
    """All parts that are not there yet; `progress` is told the rows of each as it is written."""
    waiting = [part.number for part in job.waiting]
    if not waiting:
        return
    connect(address)
    try:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        workers = min(int(ray.cluster_resources().get("CPU", 1)), len(waiting))
        parts = ray.data.from_items(waiting, override_num_blocks=min(len(waiting), _MOST_BLOCKS))
        answered = parts.map_batches(
            PartWorker,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=max(1, workers)),
            num_cpus=1,
        )
        for row in answered.iter_rows():
            if row["error"]:
                raise DataError(row["error"])
            progress(int(row["rows"]))
    except ray.exceptions.RayError as error:
        raise ResourceError(f"the batch job stopped; the same command continues it: {_first(error)}") from None
    finally:
        ray.shutdown()


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
