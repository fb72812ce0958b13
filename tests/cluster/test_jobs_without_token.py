"""The same job on a head without authentication; a module of its own, so that only one head runs at a time."""

from pathlib import Path

import pytest

from tests.cluster.conftest import Head
from tests.cluster.test_jobs import assert_trains


@pytest.mark.long
def test_without_authentication_a_job_works_the_same(open_head: Head, tmp_path: Path):
    assert_trains(open_head, tmp_path)
