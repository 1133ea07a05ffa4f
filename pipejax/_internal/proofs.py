"""Proves that both ends of a connection know the secret of a job, without sending it.

Each end draws a number at random and sends it. With the secret, its own number and that
of the other end, it then computes a proof:

    proof = HMAC-SHA256(secret, "role own other")

The proof is valid for this connection only. The role keeps an end from sending back a
proof that it has received. A process sends nothing about the job until process 0 has
proved itself. In a job without a secret, the secret is empty.
"""

import hmac
import os
import secrets
from collections.abc import Mapping

VARIABLE = "PIPEJAX_SECRET"
"""The variable that holds the secret, the same in all processes of a job."""

LISTENS, REPORTS = "process 0", "process"
"""The roles of the two ends."""


def secret_of(environ: Mapping[str, str] = os.environ) -> bytes:
    return environ.get(VARIABLE, "").encode()


def drawn() -> str:
    return secrets.token_hex(16)


def proof(secret: bytes, role: str, own: str, other: str) -> str:
    return hmac.new(secret, f"{role} {own} {other}".encode(), "sha256").hexdigest()


def proves(given: str, secret: bytes, role: str, own: str, other: str) -> bool:
    """Compares `given` with the proof of an end, in constant time."""
    return hmac.compare_digest(given.encode(), proof(secret, role, own, other).encode())
