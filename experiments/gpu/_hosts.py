"""Measures the host executor over links: two processes share one GPU."""

import os
import pathlib
import tempfile
from typing import Any

import jax
import optax
import tyro

import pipejax as pj
from experiments import cluster, overlap
from experiments.cluster import member

from ._arrays import filled, is_small


def measured(rate: str) -> dict[str, Any]:
    """Times compute, exchange and step of two hosts, on links of a given rate."""
    network = cluster.Network.of(2, (rate,))
    with tempfile.TemporaryFile("w+") as log:
        try:
            return cluster.ask(network, "experiments.gpu._hosts", (), log)
        except RuntimeError as error:
            log.seek(0)
            lines = log.read().strip().splitlines() or ["they said nothing"]
            return {"failed": f"{error} {lines[-1]}"}


def main(out: pathlib.Path) -> None:
    """Measures on one of the hosts; the first host writes the figures to `out`."""
    # JAX reads this when it first looks for the GPU. Each of the two processes takes
    # this share of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    rank = member.join()
    model: Any = "mlp" if is_small() else "resnet18"
    problem = overlap.plain_problem(model, jax.device_count())
    train = pj.make_train_step(
        problem.loss_fn, optax.adamw(1e-3), mesh=pj.data_mesh(), executor="host"
    )
    own = overlap.plain_problem(model, jax.local_device_count()).batch
    state = train.init(filled(problem.params))
    batch = train.batch(filled(own, seed=1 + rank))
    found = pj.overlap.measure(train, state, batch, rounds=2 if is_small() else 5)
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, shared"
    if rank == 0:
        member.answer({"device": device, "found": found._asdict()}, out)


if __name__ == "__main__":
    tyro.cli(main)
