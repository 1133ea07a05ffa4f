"""Commands that run on every host, as the training itself does."""

import os

import jax


def join() -> None:
    """Joins the processes that torchrun's variables speak of, if there are several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        jax.distributed.initialize(
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            int(os.environ["WORLD_SIZE"]),
            int(os.environ["RANK"]),
        )
