"""Tests the proofs that two ends of a connection know the same secret."""

import hashlib
import hmac

from pipejax._internal import proofs


def test_proof_equals_hmac_sha256():
    wanted = hmac.new(b"key", b"process ab cd", hashlib.sha256).hexdigest()
    assert proofs.proof(b"key", "process", "ab", "cd") == wanted
    assert proofs.proves(wanted, b"key", "process", "ab", "cd")


def test_proof_depends_on_every_argument():
    given = ("key", "process", "ab", "cd")
    good = proofs.proof(b"key", *given[1:])
    for changed in (
        (b"kez", "process", "ab", "cd"),
        (b"", "process", "ab", "cd"),
        (b"key", "process 0", "ab", "cd"),
        (b"key", "process", "abc", "d"),
        (b"key", "process", "cd", "ab"),
    ):
        assert not proofs.proves(good, *changed)
    assert not proofs.proves("", b"key", *given[1:])


def test_drawn_numbers_differ_each_time():
    drawn = {proofs.drawn() for _ in range(100)}
    assert len(drawn) == 100
    assert all(len(number) == 32 for number in drawn)


def test_secret_of_a_job_is_read_from_the_environment():
    assert proofs.secret_of({}) == b""
    assert proofs.secret_of({"PIPEJAX_SECRET": "s"}) == b"s"
