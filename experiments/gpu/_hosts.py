"""Measures the host executor over links: two processes share one GPU."""

import os
import pathlib
import tempfile
from typing import Any

import jax
import optax
import tyro

import pipejax as pj
from experiments import cluster
from experiments.cluster import member
from pipejax import codecs, collectives

from ._arrays import filled, is_small, large_batch

ALGORITHMS: dict[str, collectives.AllReduce] = {
    "psum": collectives.psum(),
    "two-shot bf16": collectives.two_shot(codecs.bf16()),
    "two-shot int8": collectives.two_shot(codecs.int8()),
}
HOSTS = 2
# A host adds up gradients of this many batches, so that compute and exchange take
# similar times.
MICROBATCHES = {"1gbit": 16, "10gbit": 4}


def measured(rate: str, algorithm: str) -> dict[str, Any]:
    """Times compute, exchange and step of two hosts, on links of a given rate."""
    network = cluster.Network.of(HOSTS, (rate,))
    with tempfile.TemporaryFile("w+") as log:
        try:
            count = str(MICROBATCHES[rate])
            options = ("--algorithm", algorithm, "--microbatches", count)
            return cluster.ask(network, "experiments.gpu._hosts", options, log)
        except RuntimeError as error:
            log.seek(0)
            lines = log.read().strip().splitlines() or ["they said nothing"]
            return {"failed": f"{error} {lines[-1]}"}


def main(algorithm: str, microbatches: int, out: pathlib.Path) -> None:
    """Measures on one of the hosts; the first host writes the figures to `out`."""
    # The hosts of a cluster compute on CPUs unless a program asks for more.
    jax.config.update("jax_platforms", None)
    # JAX reads these when it first looks for the GPU. Each of the two processes takes
    # this share of the GPU's memory, and a thread for each core of its own.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    os.environ["NPROC"] = str(len(os.sched_getaffinity(0)))
    rank = member.join()
    problem = large_batch(microbatches)
    train = pj.make_train_step(
        problem.loss_fn,
        optax.adamw(1e-3),
        mesh=pj.data_mesh(),
        all_reduce=ALGORITHMS[algorithm],
        microbatches=microbatches,
        executor="host",
    )
    state = train.init(filled(problem.params))
    batch = train.batch(filled(problem.batch, seed=1 + rank))
    rounds, steps = (2, 1) if is_small() else (5, 3)
    found = pj.overlap.measure(train, state, batch, rounds=rounds, steps=steps)
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, shared"
    wire = sum(transfer.wire_bytes for transfer in train.transfers(state, batch))
    if rank == 0:
        figures = {**found._asdict(), "wire_bytes": wire}
        member.answer({"device": device, "found": figures}, out)


if __name__ == "__main__":
    tyro.cli(main)
