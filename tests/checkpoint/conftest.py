"""Provides a manager of checkpoints in a temporary folder."""

import pytest

from pipejax import checkpoint


@pytest.fixture
def manager(tmp_path):
    with checkpoint.manager(tmp_path / "run") as manager:
        yield manager
