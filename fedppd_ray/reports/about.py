"""What a report says besides figures: when and how long, by which command and version, and who was dropped."""

import html
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fedppd_ray import __version__
from fedppd_ray.config.schema import Config
from fedppd_ray.reports.html import html_table
from fedppd_ray.runs.clock import now


def about_table(
    config: Config, history: Sequence[Mapping[str, Any]], journal: Sequence[Mapping[str, Any]], clients: int
) -> str:
    """Date, version, command and duration."""
    done = max((line["round"] for line in history), default=0)
    rows = [
        ("method, data", f"{config.method} on {config.data.name}, {clients} clients"),
        ("rounds", f"{done} of {config.federation.rounds}"),
        ("duration", _duration(history, journal)),
        *_commands(journal),
        ("this report", f"{_day(now())}, fedppd {__version__}"),
    ]
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table class=about>{cells}</table>"


def _commands(journal: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Who worked on the run: the first process and the last; an earlier version kept no journal."""
    if not journal:
        return []
    first, last = journal[0], journal[-1]
    rows = [("started", f"{_day(first['started'])} on {first['host']}, fedppd {first['version']}")]
    if len(journal) > 1:
        shown = f"{_day(last['started'])} on {last['host']}, fedppd {last['version']}, from round {last['first_round']}"
        rows.append((f"resumed {len(journal) - 1} times, last", shown))
    return [*rows, ("command", str(last.get("command") or "from Python"))]


def _duration(history: Sequence[Mapping[str, Any]], journal: Sequence[Mapping[str, Any]]) -> str:
    worked = f"{_span(sum(line['seconds'] for line in history))} in rounds"
    times = [line["time"] for line in history if "time" in line]
    if not (journal and times):
        return worked
    whole = datetime.fromisoformat(times[-1]) - datetime.fromisoformat(journal[0]["started"])
    return f"{worked}, {_span(whole.total_seconds())} from start to last round ({_day(times[-1])})"


def _span(seconds: float) -> str:
    """Two units at most: 3 d 4 h, 2 h 5 min, 40 s."""
    whole = round(seconds)
    for unit, name, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {smaller}"
    return f"{whole} s"


def _day(time: str) -> str:
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M UTC")


def dropped_clients(history: Sequence[Mapping[str, Any]]) -> str:
    """By name: how often, in which rounds, why the last time. "" where nobody was."""
    rounds: dict[str, list[int]] = {}
    why: dict[str, str] = {}
    for line in history:
        for failure in line["failures"]:
            rounds.setdefault(failure["client"], []).append(line["round"])
            why[failure["client"]] = failure["reason"]
    if not rounds:
        return ""
    ordered = sorted(rounds, key=lambda client: (-len(rounds[client]), client))
    rows = [[client, str(len(rounds[client])), _listed(rounds[client]), why[client]] for client in ordered]
    head = ["client", f"times dropped, of {len(history)} rounds", "in rounds", "the last time because"]
    return f"<h3>Clients dropped</h3>{html_table([head, *rows])}"


def _listed(rounds: Sequence[int], most: int = 12) -> str:
    shown = ", ".join(map(str, rounds[:most]))
    return f"{shown}, …" if len(rounds) > most else shown
