"""Errors survive pickling between processes and carry their exit code."""

import pickle

import pytest

from fedppd_ray import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.FedPPDError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind: type[errors.FedPPDError]) -> None:
    error = kind("client-03, round 4: why; what to do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.args == error.args


def test_what_the_user_must_mend_exits_with_2_and_what_failed_with_1() -> None:
    codes = {kind.__name__: kind.exit_code for kind in KINDS}
    mended = {"ConfigError", "DataError", "CheckpointError", "LockedError"}
    assert {name for name, code in codes.items() if code == 2} == mended
    assert {code for name, code in codes.items() if name not in mended} == {1}
