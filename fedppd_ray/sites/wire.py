"""What travels between a coordinator and a site: small JSON messages, and weights as safetensors. No pickle, no code.

Weights go in pieces, at an offset of a body that is named by its sha256: whoever was interrupted asks how much is there
and goes on. Fields that a newer version adds are ignored; another first number of the version is refused.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from fedppd_ray.errors import FedPPDError
from fedppd_ray.federation.types import Models
from fedppd_ray.inference import questions

WIRE = (1, 1)
PREFIX = f"/v{WIRE[0]}"
PIECE = 4 * 2**20  # bytes of weights in one request, at most
MESSAGE = 2**20  # bytes of any other body, at most
LONGEST_WAIT_S = 10.0  # of a question that has no answer yet: firewalls cut what is silent for minutes
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")


class WireError(FedPPDError):
    """A message that this side cannot take."""


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Hello(Message):
    """Who the coordinator is: the only answer that needs no signature."""

    wire: str
    coordinator: Digest


class Join(Message):
    """`proof` shows that the sender holds the code of an invitation, without saying it."""

    name: Name
    public_key: Digest
    proof: Digest


class Ask(Message):
    """Is there work? Also a sign of life. What the policy does not let go is absent."""

    wait_s: Annotated[Number, Field(ge=0, le=LONGEST_WAIT_S)] = 0.0
    rows: Annotated[int, Field(ge=1, le=2**53)] | None = None
    class_counts: tuple[Count, ...] = Field(default=(), max_length=100_000)
    answers: bool = False  # whether it may be asked about rows that it keeps back; older sites may not


class Blob(Message):
    """A body of weights: named by its content."""

    digest: Digest
    size: Count


class Task(Message):
    """One attempt at one round: what commits and failures answer."""

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    round: Annotated[int, Field(ge=1, le=2**31)]
    attempt: Annotated[int, Field(ge=1, le=2**31)]


class Offer(Message):
    """Work: from this configuration and these weights, an update of this client."""

    task: Task
    client: str
    config: Mapping[str, Any]
    state: Blob
    question: Mapping[str, Any] | None = None  # then no update is wanted, but an answer to this


class Answer(Message):
    """To a question: work, or nothing for now; or the run is over."""

    offer: Offer | None = None
    finished: bool = False


class Beat(Message):
    """Still at it."""

    task: Task


class Wanted(Message):
    """Whether anybody still waits for this task."""

    wanted: bool


class Announce(Message):
    """An update is about to come, or to come on."""

    task: Task
    blob: Blob


class Have(Message):
    """How many bytes of it are there."""

    have: Count


class Commit(Message):
    """The update is complete. Repeating it changes nothing."""

    task: Task
    digest: Digest
    rows: Annotated[int, Field(ge=1, le=2**53)]
    metrics: Mapping[Annotated[str, Field(max_length=100)], Number] = Field(default={}, max_length=200)


class Told(Message):
    """The answer to a question: name → shape and numbers; none where the site keeps too few rows back."""

    task: Task
    answer: Mapping[Annotated[str, Field(max_length=100)], tuple[tuple[Count, ...], tuple[Number, ...]]] | None

    @classmethod
    def of(cls, task: Task, answer: questions.Answer | None) -> "Told":
        if answer is None:
            return cls(task=task, answer=None)
        return cls(task=task, answer={key: (array.shape, tuple(array.ravel())) for key, array in answer.items()})

    def arrays(self) -> questions.Answer | None:
        """The answer, checked: what comes from outside is not believed."""
        if self.answer is None:
            return None
        try:
            return questions.checked_answer(
                {key: np.reshape(found, shape) for key, (shape, found) in self.answer.items()}
            )
        except ValueError as error:
            raise WireError(f"no answer to the question ({error})") from None


class Done(Message):
    state: Literal["accepted", "repeated"]


class Fail(Message):
    """There will be no update: an error at the site, or its policy says no."""

    task: Task
    reason: Annotated[str, Field(max_length=2000)]
    refused: bool = False


class Card(Message):
    """The exported student: its model card with the coordinator's signature, and where its weights are."""

    card: str
    signature: str
    weights: Blob


class Trouble(Message):
    """What went wrong. The coordinator's time lets a site with a wrong clock put itself right."""

    error: str
    time: float = 0.0


class Nothing(Message):
    """An empty body."""


def version_text() -> str:
    return f"{WIRE[0]}.{WIRE[1]}"


def version_refusal(text: str) -> str | None:
    """Why the other side's version cannot be spoken to, or None. Only the first number must agree."""
    match = _VERSION.fullmatch(text)
    if match is None:
        return f"no version of the wire in {text[:20]!r}; this side speaks {version_text()}"
    if int(match[1]) == WIRE[0]:
        return None
    older = "this" if int(match[1]) > WIRE[0] else "the other"
    return f"the other side speaks wire {text}, this one {version_text()}; update fedppd on {older} side"


def digest_of(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Body:
    """Encoded weights with their name."""

    content: bytes
    blob: Blob


def encode(models: Models) -> Body:
    content = save_tensors({role: np.ascontiguousarray(vector) for role, vector in models.items()})
    return Body(content, Blob(digest=digest_of(content), size=len(content)))


def decode(content: bytes) -> dict[str, Any]:
    """Flat float32 vectors, or WireError: what comes from outside is not believed."""
    try:
        models = load_tensors(content)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise WireError(f"the weights are no safetensors ({error})") from None
    for role, vector in models.items():
        if vector.dtype != np.float32 or vector.ndim != 1:
            raise WireError(f"{role[:40]} is {vector.dtype} {vector.shape}, expected a flat float32 vector")
    return models


def rounded_rows(rows: int) -> int:
    """To two significant digits: enough for the weights of an average, too little to single out a patient."""
    if rows < 100:
        return max(10, round(rows, -1))
    return round(rows, 1 - int(math.log10(rows)))
