"""What people should hear of their clients' classes before the first round: it costs rounds to find out later."""

import difflib
from collections.abc import Sequence

from fedppd_ray.federation.types import ClientInfo

_ALIKE = 0.8  # of two spellings
_SHORT = 4  # words, in which one letter makes another word
_MOST = 20  # classes that are worth a line each


def concerns(classes: Sequence[str], clients: Sequence[ClientInfo], in_test: Sequence[int]) -> list[str]:
    """`in_test`: test rows of each class. Of clients that do not say which classes they hold, nothing is said."""
    holders = {
        name: [info.client for info in clients if info.holds and info.holds[place]]
        for place, name in enumerate(classes)
    }
    told = [info.client for info in clients if info.holds]
    found = [_alone(name, who[0], holders, told) for name, who in holders.items() if len(who) == 1 < len(told)]
    found += [_alike(name, other, holders) for place, name in enumerate(classes) for other in classes[:place]
              if _looks_like(name, other, 1 in (len(holders[name]), len(holders[other])))]  # fmt: skip
    absent = [name for name, rows in zip(classes, in_test, strict=True) if rows == 0]
    if absent:
        found.append(f"no test row is {_listed(absent)}: no figure will say how well it is told")
    return found[:_MOST]


def _alone(name: str, client: str, holders: dict[str, list[str]], told: Sequence[str]) -> str:
    """Perhaps it is another's class under another name: one that all but this client hold."""
    others = [other for other, who in holders.items() if len(told) > 2 and set(who) == {*told} - {client}]
    perhaps = f"; it alone has no {_listed(others)}: is it the same under another name?" if others else ""
    return f"only {client} holds {name!r}: what the others learn of it is that client's alone{perhaps}"


def _alike(name: str, other: str, holders: dict[str, list[str]]) -> str:
    who = min(holders[name], holders[other], key=len)
    at = f", at {', '.join(who)}" if len(who) == 1 else ""
    return f"{name!r} and {other!r} are two classes, spelt almost alike{at}: if they are one, rename one of them"


def _looks_like(one: str, other: str, rare: bool) -> bool:
    """cat and Cat, well_done and well-done; where one is rare also cancer and cancr. Not grade 1 and grade 2."""
    first, second = ("".join(sign for sign in name.casefold() if sign.isalnum()) for name in (one, other))
    if first == second != "":
        return True
    numbers = [[sign for sign in name if sign.isdigit()] for name in (first, second)]
    if not rare or numbers[0] != numbers[1] or min(len(first), len(second)) < _SHORT:
        return False
    return difflib.SequenceMatcher(None, first, second).ratio() >= _ALIKE


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MOST]))
