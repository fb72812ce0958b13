"""What changes from round to round: rates and weights of a loss that follow a cosine over the planned rounds."""

import math


def over_rounds(start: float, end: float, round_id: int, rounds: int) -> float:
    """end + (start − end)/2 · (1 + cos(π (r − 1)/(R − 1))): `start` in round 1, `end` in round R.

    A run of one round has its start.
    """
    if start == end or rounds == 1:
        return start
    return end + (start - end) / 2 * (1 + math.cos(math.pi * (round_id - 1) / (rounds - 1)))


def begun(start: float, round_id: int, rounds: int) -> bool:
    """Whether a round lies after the first `start` (a share) of them: .75 of 200 rounds is from round 151 on."""
    # The epsilon: 0.29 × 100 = 28.999999999999996 must not begin in round 29.
    return round_id > start * rounds + 1e-9
