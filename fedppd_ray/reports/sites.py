"""What sites found with the student on rows of their own, as far as they let it be known."""

import html
import json
from pathlib import Path
from typing import Any

from fedppd_ray.runs.layout import SITE_FIGURES


def latest_figures(run: Path) -> dict[str, dict[str, Any]]:
    """Site → its newest line; a torn line is left out."""
    path, found = run / SITE_FIGURES, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[str(entry["site"])] = entry
    return dict(sorted(found.items()))


def sites_section(run: Path) -> str:
    """A table, and which site it serves worst; "" where no site has told anything."""
    found = latest_figures(run)
    if not found:
        return ""
    worst = min(found.values(), key=lambda entry: float(entry["accuracy"]))
    rows = "".join(
        f"<tr><td>{html.escape(site)}</td><td>{entry['round']}</td><td>{entry['rows']:.0f}</td>"
        f"<td>{entry['accuracy']:.2f} %</td><td>{entry['ece']:.2f} %</td></tr>"
        for site, entry in found.items()
    )
    head = "<tr><th>site</th><th>after round</th><th>rows</th><th>accuracy</th><th>ECE</th></tr>"
    return (
        f"<h2>On the sites' own rows</h2><table>{head}{rows}</table>"
        f"<p>Worst site: {html.escape(str(worst['site']))}, {worst['accuracy']:.2f} %</p>"
    )
