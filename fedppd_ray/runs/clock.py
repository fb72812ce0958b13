"""The time of day, as files of a run have it."""

from datetime import UTC, datetime


def now() -> str:
    """UTC, to the second: 2026-01-31T12:00:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")
