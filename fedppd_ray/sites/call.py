"""A site's request once it was let in, and the answer that it gets when something is wrong with it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError

from fedppd_ray.sites import wire

AnyMessage = TypeVar("AnyMessage", bound=wire.Message)


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Call:
    """A request that was let in."""

    site: str
    body: bytes
    query: Mapping[str, str]
    path: Mapping[str, str]
    run: str
    round: str

    def message(self, kind: type[AnyMessage]) -> AnyMessage:
        try:
            message = kind.model_validate_json(self.body)
        except ValidationError as error:
            first = error.errors()[0]
            raise Refusal(422, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from None
        task = getattr(message, "task", None)
        if task is not None and (task.run, str(task.round)) != (self.run, self.round):
            raise Refusal(400, "the task is not of the run and round that were signed")
        return message

    def number(self, name: str) -> int:
        text = self.query.get(name, "")
        if not re.fullmatch(r"[0-9]{1,15}", text):
            raise Refusal(400, f"{name}: a number is missing in the query")
        return int(text)

    def task(self) -> wire.Task:
        """Of a piece: run and round as they were signed, the attempt from the query."""
        try:
            return wire.Task(run=self.run, round=int(self.round), attempt=self.number("attempt"))
        except ValueError:
            raise Refusal(400, "no run and round were signed") from None


Reply = wire.Message | bytes


async def read_body(request: Request, limit: int) -> bytes:
    """All of it, unless it is more than the limit: then no more is read."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refusal(413, f"a body of more than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
