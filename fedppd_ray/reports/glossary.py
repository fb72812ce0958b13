"""The measures, in the words of somebody who has to act on them."""

import html
from collections.abc import Mapping
from typing import Any

# Key of the figures → name and meaning; what a report does not have is left out.
_MEANINGS = {
    "accuracy": ("accuracy", "Share of rows whose most probable class is the right one."),
    "nll": ("NLL", "Negative log-likelihood: the mean of −log(probability of the right class), in nats; 0 is perfect."),
    "ece": (
        "ECE",
        "Expected calibration error: how far stated confidence and accuracy are apart, averaged over 15 bins of "
        "confidence. At 5 %, answers that claim 80 % are right some 75 or 85 % of the time.",
    ),
    "mce": ("MCE", "The same gap in the worst of the bins; with few rows in a bin it is mostly noise."),
    "brier": ("Brier", "Mean squared distance between the probabilities and the right answer: 0 is perfect, 2 worst."),
    "adaptive_ece": (
        "adaptive, class-wise ECE",
        "Over bins of equally many rows; of every class's probability instead of the largest one.",
    ),
    "scaled": ("scaled", "At the temperature that calibration rows have set: what predictions are served at."),
    "temperature": ("temperature", "What all log-probabilities are divided by; above 1 it lowers confidence."),
    "misclassification_auroc": (
        "misclassification AUROC",
        "How well the score tells wrong answers from right ones: the probability that a wrong answer is the less sure "
        "of two. 0.5 is chance, 1 perfect.",
    ),
    "ood_auroc": ("OOD AUROC", "The same for rows that belong to no class (out of distribution) against test rows."),
    "fpr95": ("OOD FPR95", "Share of foreign rows that are taken for known where 95 % of the known ones are."),
    "aupr": ("OOD AUPR", "Area under the precision–recall curve of finding foreign rows among as many known ones."),
    "aurc": (
        "AURC",
        "Area under the risk–coverage curve: the share of wrong answers, averaged over how many rows are answered, "
        "surest first. Lower is better.",
    ),
    "abstention": (
        "abstains",
        "The student declines where its score is above a threshold that calibration rows have set for the wanted share "
        "of answers.",
    ),
    "per_class": (
        "recall, precision",
        "Of the rows of a class, the share that is recognised; of the answers that name the class, the share that is "
        "right. The ECE of a class is that of its probability, over all rows.",
    ),
    "per_client": (
        "per client",
        "On the common test rows, weighted to a client's own mix of classes: none of its rows is looked at.",
    ),
    "per_site": ("per site", "On rows of the site's own that were not trained on."),
}


def glossary(figures: Mapping[str, Any]) -> str:
    """What the measures of this report mean."""
    known = [meaning for key, meaning in _MEANINGS.items() if figures.get(key) is not None]
    entries = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in known)
    return f"<h2>What the measures mean</h2><dl>{entries}</dl>"
