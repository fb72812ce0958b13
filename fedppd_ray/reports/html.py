"""Tables and pages: one HTML file with everything in it, readable offline, and the same in Markdown."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_STYLE = """
:root{color-scheme:light dark;--text:#1a202c;--quiet:#4a5568;--line:#e2e8f0;--page:#fff;--box:#f7fafc;--mark:#2b6cb0}
@media (prefers-color-scheme:dark){:root{--text:#e2e8f0;--quiet:#a0aec0;--line:#2d3748;--page:#12161d;--box:#1a202b;
--mark:#90cdf4} .plots img{filter:invert(.93) hue-rotate(180deg)}}
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:var(--text);
background:var(--page)} h1,h2,h3{line-height:1.2} h2{margin-top:2.5rem;border-bottom:2px solid var(--line)}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums} td,th{padding:.25rem .8rem;
text-align:right;border-bottom:1px solid var(--line)} th:first-child,td:first-child{text-align:left}
th{font-weight:600;color:var(--quiet)} .about td{text-align:left;overflow-wrap:anywhere} img{max-width:100%;height:auto}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1rem} .wide{grid-column:1/-1}
.plots img{border-radius:.5rem} pre{background:var(--box);padding:1rem;overflow:auto} .scroll{overflow-x:auto}
.examples{display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:1rem} figure{margin:0}
.example{width:100%;image-rendering:crisp-edges;border-radius:.25rem} figcaption{font-size:.85rem;color:var(--quiet)}
dt{font-weight:600} dd{margin:0 0 .6rem;color:var(--quiet)} summary{cursor:pointer;color:var(--mark)}
@media (max-width:30rem){.plots{grid-template-columns:1fr}}
"""


_WIDE = 1200  # of a picture that has a line of its own


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


def folded(title: str, body: str) -> str:
    """What only some will read: closed until somebody opens it."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def _html_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def html_page(title: str, body: str) -> str:
    """A whole page that needs nothing but itself. `title` is text, `body` is HTML."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )
