"""How the exported student does at each client, on rows that the client keeps back: figures come back, never a row."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fedppd_ray.evaluation.metrics import metrics_of
from fedppd_ray.evaluation.per_class import mean_recall
from fedppd_ray.inference.abstention import score_of, temperature_of
from fedppd_ray.inference.questions import Answer, Question, register_question
from fedppd_ray.inference.scores import Labels, Outputs, score_named
from fedppd_ray.inference.temperature import scaled


@register_question
class OwnFigures(Question):
    """Accuracy, recall and calibration, and how many of its rows the student declines, as it is served."""

    kind: ClassVar[str] = "own_figures"
    temperature: float = 1.0
    score: str = "entropy"
    threshold: float | None = None

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        raw = outputs.log_probabilities
        served = Outputs(scaled(raw, self.temperature), outputs.logits, outputs.features)
        found, later = metrics_of(raw, labels), metrics_of(served.log_probabilities, labels)
        figures: dict[str, Any] = {
            "rows": len(labels),
            "accuracy": found.accuracy,
            "recall": mean_recall(raw, labels),
            "nll": later.nll,
            "ece": found.ece,
            "scaled_ece": later.ece,
        }
        score = score_named(self.score)
        if self.threshold is not None and score.fits(served):
            figures["abstained"] = 100 * float((score.of(served) > self.threshold).mean())
        return figures


def question_for(card: Mapping[str, Any]) -> OwnFigures:
    """About the student of this card."""
    threshold = card["abstention"]["threshold"] if card["abstention"] else None
    return OwnFigures(temperature=temperature_of(card), score=score_of(card), threshold=threshold)


def as_sites(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """As `per_site` has them; {} where nobody answered."""
    lines = [
        {"site": client, **{key: int(value) if key == "rows" else float(value) for key, value in answer.items()}}
        for client, answer in answers.items()
    ]
    return {"sites": lines, "worst": min(lines, key=lambda line: line["accuracy"])["site"]} if lines else {}
