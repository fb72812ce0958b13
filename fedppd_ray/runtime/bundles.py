"""How many virtual clients go to an actor in one call. Pure, no Ray.

A call costs about the same whether it carries one client or ten: a task, two objects, a screening and a fold on the
server. Where a client's own work takes milliseconds, that was more than the work itself.
"""

from math import ceil

# A bundle's work at most, where actors are few: the weights on their way to the server take memory.
BUNDLE_S = 0.1
# With many actors the driver has to get round to all of them while one works: so much for each, with room to spare.
TURN_S = 0.01
# A bundle is as good as lost when the deadline passes in the middle of it, so it stays well below any deadline.
LONGEST_S = 1.0
# Of the most: less is not worth a call where every actor has that much left. Nobody ends later than that after others.
LEAST = 0.4


def bundle_seconds(actors: int) -> float:
    """How long an actor works on a bundle at most."""
    return min(LONGEST_S, max(BUNDLE_S, TURN_S * actors))


def bundle_size(waiting: int, actors: int, seconds: float | None) -> int:
    """How many of `waiting` clients to send to one of `actors`; `seconds` is what one client takes, None: not known.

    Half of an even share of what is left: the bundles shrink towards the end of a round, and the actors finish
    together. In between the two limits, and never more than an even share.
    """
    if seconds is None:
        return 1
    most = bundle_seconds(actors) / max(seconds, 1e-9)
    even, half = ceil(waiting / actors), ceil(waiting / (2 * actors))
    return max(1, min(int(most), even, max(int(LEAST * most), half)))
