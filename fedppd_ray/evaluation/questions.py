"""The questions that come with the package: importing this module registers them."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fedppd_ray.evaluation import by_clients as by_clients  # whose questions come with the package too
from fedppd_ray.evaluation import federated as federated
from fedppd_ray.evaluation import own_rows as own_rows
from fedppd_ray.evaluation.metrics import metrics_of
from fedppd_ray.inference.questions import Question, register_question
from fedppd_ray.inference.scores import Labels, Outputs


@register_question
class Figures(Question):
    """How the student does on a client's own rows: accuracy, NLL, ECE and Brier score."""

    kind: ClassVar[str] = "figures"

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        return {"rows": len(labels), **metrics_of(outputs.log_probabilities, labels).as_dict()}
