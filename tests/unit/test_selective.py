"""Calibration errors, risk and coverage, foreign rows found, and clients' own figures, each by its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedppd_ray.evaluation.metrics import BINS, adaptive_ece, aupr, classwise_ece, fpr95, metrics_of, ood_auroc
from fedppd_ray.evaluation.per_client import per_client
from fedppd_ray.evaluation.selective import foreign_figures, mean_ood_auroc, score_figures, selective_figures
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.inference.scores import ENTROPY, Floats, Labels, Outputs, entropy, score_named
from fedppd_ray.models.torchvision_import import import_torchvision


def predictions(rows: int, seed: int, classes: int = 4) -> tuple[Floats, Labels]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 2, (rows, classes))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True)), generator.integers(0, classes, rows)


# ---- calibration


def test_adaptive_ece_of_equally_many_rows_a_bin() -> None:
    """Thirty rows, two a bin: in each the gap between their mean confidence and their accuracy."""
    confidence = np.linspace(0.51, 0.99, 30)
    log_p = np.log(np.column_stack([confidence, 1 - confidence]))
    labels = np.array([0, 1] * 15)  # of every pair one is right
    wanted = np.mean([abs(confidence[at : at + 2].mean() - 0.5) for at in range(0, 30, 2)])
    order = np.random.default_rng(0).permutation(30)
    assert adaptive_ece(log_p[order], labels[order]) == pytest.approx(100 * wanted)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 80), st.integers(0, 999))
def test_classwise_ece_is_the_mean_over_classes_of_a_one_against_the_rest_ece(rows: int, seed: int) -> None:
    log_p, labels = predictions(rows, seed)
    p, total = np.exp(log_p), 0.0
    for which in range(4):
        for low in range(BINS):
            inside = (p[:, which] > low / BINS) & (p[:, which] <= (low + 1) / BINS)
            if inside.any():
                total += inside.mean() * abs(p[inside, which].mean() - (labels[inside] == which).mean())
    assert classwise_ece(log_p, labels) == pytest.approx(100 * total / 4, abs=1e-9)


# ---- risk and coverage


def test_aurc_and_selective_accuracy_of_five_rows() -> None:
    """In the order of the score: right, wrong, right, right, wrong."""
    scores = np.array([0.5, 0.1, 0.3, 0.2, 0.9])
    right = np.array([True, True, True, False, False])
    log_p = np.log(np.tile([0.9, 0.1], (5, 1)))
    figures = selective_figures(scores, Outputs(log_p), np.where(right, 0, 1))
    assert figures["aurc"] == pytest.approx(100 * (0 + 1 / 2 + 1 / 3 + 1 / 4 + 2 / 5) / 5)
    assert figures["accuracy_at_80"] == pytest.approx(75)  # four of five
    assert figures["accuracy_at_90"] == figures["accuracy_at_95"] == pytest.approx(60)
    assert figures["misclassification_auroc"] == pytest.approx(4 / 6)


def test_a_score_that_knows_has_the_lowest_aurc_and_without_a_wrong_answer_there_is_no_auroc() -> None:
    log_p, labels = predictions(200, 0)
    wrong = (log_p.argmax(1) != labels).astype(float)
    knows = selective_figures(wrong, Outputs(log_p), labels)["aurc"]
    assert knows < selective_figures(entropy(log_p), Outputs(log_p), labels)["aurc"]
    assert selective_figures(entropy(log_p), Outputs(log_p), log_p.argmax(1))["misclassification_auroc"] is None


# ---- foreign rows


def test_fpr95_counts_the_foreign_rows_below_the_score_that_admits_95_percent() -> None:
    inside = np.arange(100.0)
    assert fpr95(np.array([10.0, 94.0, 94.5, 200.0]), inside) == 50  # admitted up to 94
    assert math.isnan(fpr95(np.empty(0), inside))


@settings(max_examples=20, deadline=None)
@given(st.integers(20, 200), st.integers(0, 999))
def test_fpr95_is_torchmetrics_specificity_at_95_percent_sensitivity(rows: int, seed: int) -> None:
    import_torchvision()
    from torchmetrics.functional.classification import binary_specificity_at_sensitivity

    generator = np.random.default_rng(seed)
    inside, outside = generator.uniform(0, 0.8, rows), generator.uniform(0.2, 1, rows)
    known = torch.from_numpy(1 - np.concatenate([inside, outside]))  # known rows are the positives there
    target = torch.tensor([1] * rows + [0] * rows)
    specificity = float(binary_specificity_at_sensitivity(known, target, min_sensitivity=0.95 - 1e-6)[0])
    assert fpr95(outside, inside) == pytest.approx(100 * (1 - specificity), abs=1e-3)


def test_average_precision_of_a_ranking() -> None:
    """Ranked: foreign, known, foreign, known: precision 1 at the first, 2/3 at the second."""
    assert aupr(np.array([9.0, 7.0]), np.array([8.0, 6.0])) == pytest.approx((1 + 2 / 3) / 2)


def test_one_set_has_the_auroc_it_always_had_and_several_have_their_mean() -> None:
    known, near, far = (predictions(rows, seed)[0] for rows, seed in ((90, 0), (60, 1), (120, 2)))
    one = mean_ood_auroc(entropy(known), {"near": entropy(near)}, seed=5)
    assert one == ood_auroc(known, near, 5)
    both = mean_ood_auroc(entropy(known), {"near": entropy(near), "far": entropy(far)}, seed=5)
    assert both[0] == pytest.approx((one[0] + ood_auroc(known, far, 5)[0]) / 2)
    found = foreign_figures(entropy(known), {"near": entropy(near), "far": entropy(far)}, seed=5)
    assert (found["near"]["auroc"], found["near"]["auroc_sd"]) == one
    assert found["far"]["fpr95"] == fpr95(entropy(far), entropy(known))


def test_the_figures_of_a_score_need_what_the_score_needs() -> None:
    log_p, labels = predictions(40, 3)
    assert score_figures(score_named("energy"), Outputs(log_p), labels, {}, 0) is None
    figures = score_figures(ENTROPY, Outputs(log_p), labels, {}, 0)
    assert figures is not None
    assert "ood" not in figures


# ---- clients


def test_a_clients_figures_are_those_of_test_rows_repeated_to_its_mix() -> None:
    log_p, labels = predictions(60, 4)
    labels[:4] = range(4)
    present = np.bincount(labels, minlength=4)
    mixes = [(1, 2, 0, 3), (5, 0, 0, 0), (1, 1, 1, 1)]
    clients = [ClientInfo(f"client-{at:02d}", sum(mix), mix) for at, mix in enumerate(mixes)]
    figures = per_client(log_p, labels, clients)
    scale = math.lcm(*present.tolist())
    wanted = []
    for mix in mixes:
        rows = np.repeat(np.arange(60), [mix[label] * scale // present[label] for label in labels])
        wanted.append(metrics_of(log_p[rows], labels[rows]))
    accuracies, eces = [one.accuracy for one in wanted], [one.ece for one in wanted]
    assert figures["accuracy"]["worst"] == pytest.approx(min(accuracies))
    assert figures["accuracy"]["p10"] == pytest.approx(np.percentile(accuracies, 10))
    assert figures["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert figures["ece"]["worst"] == pytest.approx(max(eces))
    assert figures["ece"]["p10"] == pytest.approx(np.percentile(eces, 90))


def test_clients_whose_classes_were_never_tested_are_not_asked_about() -> None:
    log_p, labels = np.log(np.full((3, 2), 0.5)), np.zeros(3, np.int64)
    clients = [ClientInfo("client-00", 4, (4, 0)), ClientInfo("client-01", 4, (0, 4))]
    assert per_client(log_p, labels, clients)["clients"] == 1
    assert per_client(log_p, labels, clients[1:]) == {}
