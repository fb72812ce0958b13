"""Where everything lies in a run folder, and in the folder of a study. The only file that knows.

runs/demo/
  config.yaml                     every setting, resolved
  metrics.jsonl                   one line per round
  clients.json                    who holds how many rows
  journal.jsonl                   one line per process that worked on it: when, which command, which version
  .lock                           held by the process that writes here
  checkpoints/round-000020/       state.safetensors, manifest.json
  student/                        student.safetensors, model.json: all that serving needs; model.sig where it is signed
  client_figures.json             the exported student on rows that clients keep back, where they do
  sites.jsonl                     what sites found on rows of their own, where they consent
  report.html  plots/*.png
  figures.json                    a study's figures of this run; figures-best.json: of its best round
"""

import re

CONFIG, METRICS, CLIENTS, JOURNAL = "config.yaml", "metrics.jsonl", "clients.json", "journal.jsonl"
LOCK = ".lock"  # of a run, and of a study
CHECKPOINTS, STATE, MANIFEST = "checkpoints", "state.safetensors", "manifest.json"
STUDENT, WEIGHTS, CARD = "student", "student.safetensors", "model.json"
SIGNATURE = "model.sig"  # of the card, by whoever made the export
# What the exported student is worth at each client, on rows that it keeps back.
CLIENT_FIGURES = "client_figures.json"
# What sites found with each round's student on rows of their own.
SITE_FIGURES = "sites.jsonl"
REPORT, PLOTS = "report.html", "plots"
FIGURES, BEST_FIGURES = "figures.json", "figures-best.json"
# Of a study.
RESULTS, TIDY, TABLE = "results.json", "results.csv", "table.md"

# The names are spelt out: keys of a bucket are outside data, and must not lead out of the local folder.
_STATE_FILES = rf"{CHECKPOINTS}/round-\d+/(?:{re.escape(STATE)}|{re.escape(MANIFEST)})"
TO_RESUME = re.compile(rf"{re.escape(CONFIG)}|{re.escape(METRICS)}|{re.escape(JOURNAL)}|{_STATE_FILES}")
TO_READ = re.compile("|".join(map(re.escape, (CONFIG, METRICS, CLIENTS, JOURNAL, CLIENT_FIGURES))))


def checkpoint_of(round_id: int) -> str:
    """The name of a round's folder in checkpoints/; sorting by name is sorting by round."""
    return f"round-{round_id:06d}"


ANY_CHECKPOINT = "round-*"
UNFINISHED = ".new-"  # prefix of a checkpoint that is being written


def student_file(name: str) -> str:
    return f"{STUDENT}/{name}"
