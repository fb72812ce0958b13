"""How many virtual clients go to an actor in one call. Pure, no Ray.

A call costs about the same whether it carries one client or ten: a task, two objects, a screening and a fold on the
server. Where a client's own work takes milliseconds, that was more than the work itself.
"""

from math import ceil

# A bundle is as good as lost when the deadline passes in the middle of it, so it stays well below any deadline.
# Twice as much would save up to half of the calls, but the weights on their way to the server would take twice the
# memory.
BUNDLE_S = 0.1
# Less is not worth a call where there is more for every actor. The last actor ends at most that much after the others.
LEAST_S = 0.04


def bundle_size(waiting: int, actors: int, seconds: float | None) -> int:
    """How many of `waiting` clients to send to one of `actors`; `seconds` is what one client takes, None: not known.

    Half of an even share of what is left: the bundles shrink towards the end of a round, and the actors finish
    together. In between the two limits, and never more than an even share.
    """
    if seconds is None:
        return 1
    most, least = (int(limit / max(seconds, 1e-9)) for limit in (BUNDLE_S, LEAST_S))
    even, half = ceil(waiting / actors), ceil(waiting / (2 * actors))
    return max(1, min(most, even, max(least, half)))
