"""Tests which ranks and addresses a place accepts."""

import re

import pytest

from pipejax import launch
from pipejax.launch._place import check_address


@pytest.mark.parametrize("rank", [0, 3])
def test_rank_below_the_number_of_processes_is_accepted(rank):
    place = launch.Place("Slurm", "host:1234", 4, rank)
    assert (place.rank, place.processes, place.devices) == (rank, 4, None)


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_out_of_range_is_refused(rank):
    says = (
        f"`rank` must lie in [0, 4), since there are 4 processes; got {rank} (Slurm)."
    )
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        launch.Place("Slurm", "host:1234", 4, rank)


def test_bad_coordinator_is_refused_with_its_source():
    with pytest.raises(ValueError, match=r"^`coordinator` must be .* 'host' \(Slurm\)"):
        launch.Place("Slurm", "host", 4, 0)


@pytest.mark.parametrize(
    "address", ["host:1", "10.0.0.1:65535", "[fe80::1]:1234", "a.b.c:80"]
)
def test_valid_address_is_returned_unchanged(address):
    assert check_address("bind", address, "the argument") == address


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1", "host:1x"]
)
def test_malformed_address_is_refused(address):
    says = f"`bind` must be host:port, got {address!r} (the argument)."
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        check_address("bind", address, "the argument")
