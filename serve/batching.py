"""Dynamic batching: requests that wait at the same moment share one forward pass.

While a pass runs, arrivals queue; the next pass takes them all. A lone request therefore never waits for company,
and no delay needs tuning. (Ray's own batching decorator counts requests, not images, and needs Ray.)
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from fedppd_ray.data.parts import RawRows
from fedppd_ray.inference.scores import Floats
from serve.priority import lower_priority
from serve.student import ServedStudent


@dataclass(frozen=True)
class _Job:
    student: ServedStudent
    values: RawRows
    answer: "asyncio.Future[Floats]"


class Batcher:
    """Lives on one event loop. `observe` is told the rows of every forward pass."""

    def __init__(self, max_rows: int, threads: int | None, observe: Callable[[int], None]) -> None:
        self._max_rows = max_rows
        self._observe = observe
        self._waiting: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None
        # One thread for shared passes and one for requests too large to share, so that those do not hold up others.
        # Torch counts its helper threads for each calling thread: these two may use them all, the event loop's none.
        self._shared = ThreadPoolExecutor(1, thread_name_prefix="batch", initializer=_begin, initargs=(threads, False))
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large", initializer=_begin, initargs=(threads, True))

    async def log_probabilities(self, student: ServedStudent, values: RawRows) -> Floats:
        loop = asyncio.get_running_loop()
        if len(values) > self._max_rows:
            self._observe(len(values))
            return await loop.run_in_executor(self._large, student.log_probabilities, values)
        job = _Job(student, values, loop.create_future())
        self._waiting.append(job)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await job.answer

    async def _work(self) -> None:
        while jobs := self._take():
            answered = [(group, await self._answers(group)) for group in _by_student(jobs)]
            # Let new ones queue before the next pass, and these callers answer together.
            await asyncio.sleep(0)
            for group, answers in answered:
                _deliver(group, answers)

    async def _answers(self, jobs: list[_Job]) -> Floats | Exception:
        """One pass for jobs of one student; what goes wrong belongs to these callers, and the worker goes on."""
        student = jobs[0].student
        try:
            rows = jobs[0].values if len(jobs) == 1 else np.concatenate([job.values for job in jobs])
            self._observe(len(rows))
            if student.is_quick(len(rows)):
                # Cheaper than two thread switches, and too short to be felt by other requests.
                return student.log_probabilities(rows)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._shared, student.log_probabilities, rows)
        except Exception as error:
            return error

    def _take(self) -> list[_Job]:
        """The longest run of waiting jobs that fits a pass; callers who left are skipped."""
        jobs: list[_Job] = []
        rows = 0
        while self._waiting:
            job = self._waiting[0]
            if not job.answer.done():
                if jobs and rows + len(job.values) > self._max_rows:
                    break
                jobs.append(job)
                rows += len(job.values)
            self._waiting.popleft()
        return jobs

    def close(self) -> None:
        self._shared.shutdown(wait=True)
        self._large.shutdown(wait=True)


def _by_student(jobs: list[_Job]) -> list[list[_Job]]:
    """After a hot reload, and beside a canary, two students are asked: each request gets the one it was checked for."""
    groups: dict[int, list[_Job]] = {}
    for job in jobs:
        groups.setdefault(id(job.student), []).append(job)
    return list(groups.values())


def _deliver(jobs: list[_Job], answers: Floats | Exception) -> None:
    start = 0
    for job in jobs:
        stop = start + len(job.values)
        if not job.answer.done():
            if isinstance(answers, Exception):
                job.answer.set_exception(answers)
            else:
                job.answer.set_result(answers[start:stop])
        start = stop


def _begin(threads: int | None, patient: bool) -> None:
    if patient:
        lower_priority()  # before torch makes its helper threads, which inherit it
    if threads is not None:
        torch.set_num_threads(threads)
