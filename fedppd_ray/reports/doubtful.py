"""The held-out rows that the student is least sure of, for somebody to look at."""

import base64
import html

import numpy as np

from fedppd_ray.config.schema import Config
from fedppd_ray.data.parts import Values
from fedppd_ray.data.pictures import picture_bytes
from fedppd_ray.evaluation.run import Evaluation
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.scores import entropy
from fedppd_ray.inference.temperature import scaled
from fedppd_ray.reports.html import html_table

MOST = 12


def doubtful_section(config: Config, evaluation: Evaluation) -> str:
    """Images as they are, rows of a table by their number; "" where there are no rows to look at."""
    if not len(evaluation.labels):
        return ""
    served = scaled(evaluation.log_probabilities, evaluation.figures.get("temperature", 1.0))
    scores = entropy(served) if evaluation.scores is None else evaluation.scores
    rows = np.argsort(-scores, kind="stable")[:MOST]
    classes, p = config.dataset.classes, np.exp(served)
    told = [(int(row), classes[evaluation.labels[row]], classes[p[row].argmax()], p[row].max()) for row in rows]
    note = f"<p>The {len(told)} of {len(scores)} test rows with the highest score; no client's row is among them.</p>"
    if config.dataset.table is not None:
        cells = [["test row", "it is", "the student says", "score"]]
        for (row, is_, says, share), score in zip(told, scores[rows], strict=True):
            cells.append([str(row + 1), is_, f"{says}, {100 * share:.0f} %", f"{score:.3f}"])
        return f"<h2>Most doubtful</h2>{note}{html_table(cells)}"
    images = HeldOut(config).images("test")[rows]
    figures = "".join(
        f'<figure><img class=example alt="held-out row {row + 1}" src="data:image/png;base64,{_png(image, config)}">'
        f"<figcaption>{_caption(row, is_, says, share)}</figcaption></figure>"
        for image, (row, is_, says, share) in zip(images, told, strict=True)
    )
    return f"<h2>Most doubtful</h2>{note}<div class=examples>{figures}</div>"


def _png(image: Values, config: Config) -> str:
    return base64.b64encode(picture_bytes(image, config.dataset.range)).decode()


def _caption(row: int, is_: str, says: str, share: float) -> str:
    verdict = "right" if is_ == says else f"is {html.escape(is_)}"
    return f"row {row + 1}: says {html.escape(says)}, {100 * share:.0f} %, {verdict}"
