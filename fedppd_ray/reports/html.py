"""Tables and pages: one HTML file with everything in it, readable offline, and the same in Markdown."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1a202c}
h1,h2{line-height:1.2} table{border-collapse:collapse;margin:1rem 0} td,th{padding:.25rem .8rem;text-align:right;
border-bottom:1px solid #e2e8f0} th:first-child,td:first-child{text-align:left} img{max-width:100%;height:auto}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1rem} .wide{grid-column:1/-1}
pre{background:#f7fafc;padding:1rem;overflow:auto} .scroll{overflow-x:auto}
"""


_WIDE = 800  # of a picture on the screen


def named(ood: object) -> str | None:
    """One out-of-distribution set, several or none, as text."""
    return ", ".join(map(str, ood)) if isinstance(ood, (list, tuple)) else (None if ood is None else str(ood))


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """A heading and rows; the first column is words, the others are numbers."""
    head, *rows = cells
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def html_table(cells: Sequence[Sequence[str]]) -> str:
    head, *rows = cells
    first = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{first}</tr>{body}</table></div>"


def pictures(paths: Sequence[Path]) -> str:
    """PNG files as part of the page itself, side by side; one of several panels has a line of its own."""
    images = ""
    for path in paths:
        content = path.read_bytes()
        width = int.from_bytes(content[16:20], "big")  # of a PNG, always there
        images += f'<img{" class=wide" if width > _WIDE else ""} alt="{path.stem.replace("_", " ")}" '
        images += f'src="data:image/png;base64,{base64.b64encode(content).decode()}">'
    return f"<div class=plots>{images}</div>"


Tables = Mapping[str, Sequence[Sequence[str]]]  # heading → cells


def markdown_page(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str], more: Tables | None = None) -> str:
    """Several runs in one table, and what one must know to read it; further tables below."""
    listed = "\n".join(f"- {note}" for note in notes)
    further = "".join(f"\n## {heading}\n\n{markdown_table(table)}\n" for heading, table in (more or {}).items())
    return f"# {title}\n\n{markdown_table(cells)}\n\n{listed}\n{further}"


def study_page(
    title: str,
    cells: Sequence[Sequence[str]],
    notes: Sequence[str],
    plots: Sequence[Path],
    settings: Mapping[str, Any],
    differences: Sequence[str] = (),
    more: Tables | None = None,
) -> str:
    """The same as a page, with pictures and the configuration."""
    further = "".join(f"<h2>{html.escape(name)}</h2>{html_table(table)}" for name, table in (more or {}).items())
    differing = f"<h2>How the settings differ from the first method's</h2>{_html_list(differences)}"
    text = html.escape(yaml.safe_dump(dict(settings), sort_keys=False))
    return html_page(
        title,
        f"{html_table(cells)}{_html_list(notes)}{further}{pictures(plots)}{differing if differences else ''}"
        f"<h2>The configuration</h2><pre>{text}</pre>",
    )


def _html_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def html_page(title: str, body: str) -> str:
    """A whole page that needs nothing but itself. `title` is text, `body` is HTML."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )
