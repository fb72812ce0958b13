"""Temperature and threshold from clients' sums are those of all their rows together."""

from collections.abc import Mapping

import numpy as np
import pytest

from fedppd_ray.config.schema import EvaluationConfig
from fedppd_ray.evaluation.calibration import calibrate
from fedppd_ray.evaluation.federated import BINS, calibrate_by_asking
from fedppd_ray.inference.questions import Answer, Question, answer_to, question_of
from fedppd_ray.inference.scores import Labels, Outputs
from fedppd_ray.inference.temperature import scaled

Site = tuple[Outputs, Labels]


def site(rows: int, seed: int, classes: int = 5) -> Site:
    """A network that is too sure of itself by half."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 1.5, (rows, classes)) + generator.normal(0, 0.5, classes)
    log_p = scaled(logits, 1.0 + 1e-9)
    labels = np.array([generator.choice(classes, p=np.exp(row) / np.exp(row).sum()) for row in log_p])
    return Outputs(scaled(log_p, 0.6), logits / 0.6), labels


class Clients:
    def __init__(self, *sites: Site) -> None:
        self.sites, self.asked = sites, list[Question]()

    def ask(self, question: Question) -> Mapping[str, Answer]:
        self.asked.append(question)
        told = question_of(question.told())  # as it arrives at a site
        answers = {f"site-{place}": answer_to(told, *rows) for place, rows in enumerate(self.sites)}
        return {name: answer for name, answer in reversed(answers.items()) if answer is not None}


def together(sites: tuple[Site, ...]) -> Site:
    return (
        Outputs(
            np.concatenate([outputs.log_probabilities for outputs, _ in sites]),
            np.concatenate([outputs.logits for outputs, _ in sites]),  # type: ignore[misc]
        ),
        np.concatenate([labels for _, labels in sites]),
    )


@pytest.mark.parametrize("score", ["entropy", "max_probability", "energy", "max_logit"])
def test_sums_of_sites_give_what_their_rows_would(score: str) -> None:
    clients = Clients(site(150, 0), site(40, 1), site(90, 2))
    config = EvaluationConfig(score=score)
    found = calibrate_by_asking(config, clients.ask, 5)
    known, labels = together(clients.sites)
    central = calibrate(config, known, labels, lambda: known)
    assert found.temperature == pytest.approx(central.temperature, rel=1e-3)
    assert found.nll == pytest.approx(central.nll, rel=1e-12)
    assert found.abstention is not None
    assert central.abstention is not None
    assert (found.abstention["rows"], found.abstention["clients"]) == (280, 3)
    step = found.abstention["resolution"]
    for row, exact in zip(found.abstention["table"], central.abstention["table"], strict=True):
        assert row["coverage"] == exact["coverage"]
        # Above the exact one by at most a bin, but for what another temperature in the fourth digit moves.
        assert -2e-3 <= row["threshold"] - exact["threshold"] <= step + 2e-3
        assert row["risk"] == pytest.approx(exact["risk"], abs=100 * 4 / 280)
    assert len(clients.asked) <= 4


def test_at_least_the_asked_share_is_answered_and_hardly_more() -> None:
    clients = Clients(site(400, 3), site(300, 4))
    found = calibrate_by_asking(EvaluationConfig(coverage=0.9), clients.ask, 5)
    assert found.abstention is not None
    known, _ = together(clients.sites)
    p = np.exp(scaled(known.log_probabilities, found.temperature))
    entropies = -(p * np.log(p)).sum(axis=1)
    answered = int((entropies <= found.abstention["threshold"]).sum())
    assert 631 <= answered <= 631 + 700 * 3 / BINS + 5


def test_the_bits_do_not_depend_on_who_answers_first() -> None:
    clients = Clients(site(150, 0), site(40, 1), site(90, 2))
    backwards = lambda question: dict(reversed(clients.ask(question).items()))  # noqa: E731
    one, other = (calibrate_by_asking(EvaluationConfig(), ask, 5) for ask in (clients.ask, backwards))
    assert one == other


def test_few_rows_set_a_temperature_and_no_threshold_and_none_set_nothing() -> None:
    few = calibrate_by_asking(EvaluationConfig(), Clients(site(18, 0)).ask, 5)
    assert few.abstention is None
    assert few.temperature != 1
    none = calibrate_by_asking(EvaluationConfig(), Clients(site(9, 0), site(3, 1)).ask, 5)
    assert (none.abstention, none.temperature, none.nll) == (None, 1.0, None)
