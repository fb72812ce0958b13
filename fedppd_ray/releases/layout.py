"""Where everything lies in a registry of students. The only file that knows.

registry/
  registry.json                     what makes it a registry
  gates.yaml                        gates for every promotion, where an operator has put them there
  pointers.json                     current, candidate, and what was current before
  audit.jsonl                       one line per decision (at a URL: one object each, audit/00000001.json, …)
  versions/20-563142dc1f3f-09ab12cd/
    student/                        as in a run folder: weights, card, signature
    figures.json                    what the gates looked at
    version.json                    digests of these, whence and by whom; written last
    verdict-20260131T120000Z.json   what the gates said, and .md for people
"""

import re

MARK, GATES, POINTERS = "registry.json", "gates.yaml", "pointers.json"
AUDIT, AUDIT_LOCK = "audit.jsonl", ".audit.lock"
VERSIONS, MANIFEST = "versions", "version.json"
FIGURES = "figures.json"
VERDICT = "verdict-"

# Round, digest of the weights, digest of the card: the same export has the same name wherever it is registered.
VERSION = re.compile(r"\d+-[0-9a-f]{12}-[0-9a-f]{8}")
_AUDIT_OBJECT = re.compile(r"audit/(\d{8})\.json")


def version_name(round_id: int, weights: str, card: str) -> str:
    return f"{round_id}-{weights[:12]}-{card[:8]}"


def version_folder(version: str) -> str:
    return f"{VERSIONS}/{version}"


def version_file(version: str, name: str) -> str:
    return f"{VERSIONS}/{version}/{name}"


def audit_object(number: int) -> str:
    return f"audit/{number:08d}.json"


def audit_number(name: str) -> int | None:
    match = _AUDIT_OBJECT.fullmatch(name)
    return int(match[1]) if match else None
