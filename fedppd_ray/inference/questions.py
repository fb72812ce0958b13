"""What clients may be asked about rows that they keep back: sums over them, never a row or the score of one.

A question is a name and a few numbers, so that it can travel to a site as data; the function behind the name is
installed there. It is given what the network that would be exported says of the rows (`Outputs`) and their labels, and
answers with a few numbers. A client of few such rows does not answer: a sum over three rows is almost the rows.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedppd_ray.config.nouns import QUESTIONS
from fedppd_ray.config.section import Section
from fedppd_ray.inference.scores import Labels, Outputs

FEWEST_ROWS = 10  # that an answer is about
MOST_NUMBERS = 20_000  # of an answer: a histogram, a table of classes by classes
_MOST_NAMES = 64

Answer = Mapping[str, NDArray[np.float64]]
KIND = "kind"


class Question(Section):
    """Subclass it, give it a `kind`, fields that are numbers or texts, and `answer`; then `register_question` it."""

    kind: ClassVar[str]

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        """Name → a number or a small array: pure, and of a size that does not depend on the number of rows."""
        raise NotImplementedError

    def told(self) -> dict[str, Any]:
        """As data: `question_of` makes the same question of it."""
        return {KIND: self.kind, **self.model_dump(mode="json")}


AnyQuestion = TypeVar("AnyQuestion", bound=type[Question])


def register_question(question: AnyQuestion) -> AnyQuestion:
    """Make a question known by its kind; a class decorator."""
    QUESTIONS.register(question.kind, question, question.__module__)
    return question


def question_of(told: Mapping[str, Any]) -> Question:
    """A question that came from elsewhere; ValueError for one that is not known here."""
    values = dict(told)
    kind = values.pop(KIND, None)
    if not isinstance(kind, str) or kind not in QUESTIONS:
        raise ValueError(f"unknown question {str(kind)[:40]!r}; update fedppd there or here")
    try:
        question: Question = QUESTIONS[kind].model_validate(values)
    except ValidationError as error:
        raise ValueError(f"question {kind}: {error.errors()[0]['msg']}") from None
    return question


def checked_answer(found: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """float64 arrays of finite numbers, few enough to be no rows; ValueError otherwise."""
    if len(found) > _MOST_NAMES:
        raise ValueError(f"an answer of {len(found)} entries; at most {_MOST_NAMES} may leave a client")
    answer = {str(name): np.array(value, np.float64) for name, value in found.items()}
    numbers = sum(value.size for value in answer.values())
    if numbers > MOST_NUMBERS:
        raise ValueError(f"an answer of {numbers} numbers; at most {MOST_NUMBERS} may leave a client")
    for name, value in answer.items():
        if not np.isfinite(value).all():
            raise ValueError(f"{name[:40]} is not finite: the weights have diverged")
    return answer


def answer_to(question: Question, outputs: Outputs, labels: Labels) -> Answer | None:
    """What leaves a client; None where it keeps back fewer rows than anybody may be told about."""
    if len(labels) < FEWEST_ROWS:
        return None
    return checked_answer(question.answer(outputs, labels))
