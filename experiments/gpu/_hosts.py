"""The host executor over real links: two processes that share one GPU."""

import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import tyro

from experiments import cluster


def measured(rate: str) -> dict[str, Any]:
    """Compute, exchange and step of two hosts, on links of this rate."""
    module = "experiments.gpu._hosts"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")  # two share one
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, "--out", str(out)]
        with (pathlib.Path(folder) / "hosts.log").open("w+") as log:
            code = cluster.start(cluster.Network.of(2, (rate,)), command, log)
            log.seek(0)
            lines = log.read().strip().splitlines() or ["they said nothing"]
        if code:
            return {"failed": f"exit code {code}: {lines[-1]}"}
        return json.loads(out.read_text())


def main(out: pathlib.Path) -> None:
    """What each host runs."""
    import jax
    import optax

    import pipejax as pj
    from experiments import overlap
    from experiments.cluster import member

    from ._arrays import filled, is_small

    rank = member.join()
    problem = overlap.plain_problem(
        "mlp" if is_small() else "resnet18", jax.device_count()
    )
    train = pj.make_train_step(
        problem.loss_fn, optax.adamw(1e-3), mesh=pj.data_mesh(), executor="host"
    )
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // 2, *x.shape[1:]), x.dtype),
        problem.batch,
    )
    state = train.init(filled(problem.params))
    batch = train.batch(filled(shapes, seed=1 + rank))
    found = pj.overlap.measure(train, state, batch, rounds=2 if is_small() else 5)
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, shared"
    if rank == 0:
        record = {"device": device, "found": found._asdict()}
        out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
