"""What the command shows: tables, log lines as text or as one JSON object each, and its last word."""

import csv
import datetime
import enum
import io
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class _CurrentStdout(logging.StreamHandler[Any]):
    """Writes to whatever sys.stdout is now: the live display replaces it while it runs."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("the stream is sys.stdout")


class _JsonFormatter(logging.Formatter):
    """One object a line, for log collectors; `extra={"fields": {…}}` of a record becomes keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(verbose: bool, log_format: LogFormat) -> None:
    handler = _CurrentStdout()
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if log_format is LogFormat.JSON else text)
    for name in ("fedppd", "fedppd_ray"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.DEBUG if verbose else logging.INFO)
        logger.propagate = False


def print_table(title: str, head: tuple[str, ...], rows: list[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE, show_header=any(head))
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def fail(message: str, code: int) -> NoReturn:
    print(f"fedppd: {message}", file=sys.stderr)
    raise SystemExit(code)


def answers_as_csv(answers: Sequence[Mapping[str, Any]]) -> str:
    """Answers for the rows of a table: row, label, probabilities, entropy, abstain, and columns beyond training's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    probabilities = [f"probability_{number}" for number in range(len(answers[0]["probabilities"]))]
    sets = ["set"] if "set" in answers[0] else []
    head = ["file", "row", "label", "class_name"]
    writer.writerow([*head, *probabilities, "entropy", "abstain", "outside", "ood", *sets])
    for answer in answers:
        first = [answer[key] for key in head] + answer["probabilities"]
        more = [int(answer["ood"]), *(";".join(answer[key]) for key in sets)]
        writer.writerow([*first, answer["entropy"], int(answer["abstain"]), ";".join(answer["outside"]), *more])
    return text.getvalue()
