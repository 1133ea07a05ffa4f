"""Fixtures for the tests of the commands."""

import json

import pytest

from pipejax import timing

from .helpers import CLUSTER


@pytest.fixture
def file(tmp_path):
    """Returns the path of a calibrated cluster."""
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"cluster": timing.as_json(CLUSTER)}))
    return str(path)
