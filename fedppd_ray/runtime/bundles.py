"""How many virtual clients go to an actor in one call. Pure, no Ray.

A call costs about the same whether it carries one client or ten: a task, two objects, a screening and a fold on the
server. Where a client's own work takes milliseconds, that was more than the work itself.
"""

from math import ceil

# A bundle is as good as lost when the deadline passes in the middle of it, so it stays well below any deadline.
BUNDLE_S = 0.1


def bundle_size(waiting: int, actors: int, seconds: float | None) -> int:
    """How many of `waiting` clients to send to one of `actors`; `seconds` is what one client takes, None: not known.

    At most half of an even share of what is left: the bundles shrink towards the end of a round, and the actors
    finish together.
    """
    if seconds is None:
        return 1
    share = ceil(waiting / (2 * actors))
    return max(1, min(waiting, share, int(BUNDLE_S / max(seconds, 1e-9))))
