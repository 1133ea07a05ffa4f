"""D-Sync, PS-Sync and Pipe-SGD: `pj.make_train_step` with width and all-reduce."""

from typing import Any

import jax

import pipejax as pj
from pipejax.codecs import Linear
from pipejax.collectives import AllReduce

from ._method import Batch, Method, Trainable


class Stepped(Method):
    """A step of pipejax over all hosts, and its state.

    Attributes:
      train: A `pj.TrainStep`, or a `pj.LocalTrainStep`.
      state: The state after the last step.
    """

    train: Any
    state: Any

    def step(self, batch: Batch) -> None:
        """Dispatches a step; with the host executor, waits for the sum that is due."""
        self.state, _ = self.train.step(self.state, self.train.batch(batch))

    def wait(self) -> None:
        """Waits until the state has been computed; reductions in flight continue."""
        jax.block_until_ready(self.state)

    def join(self) -> None:
        """Waits for the reductions under way."""
        self.wait()
        self.train.join()

    def finish(self) -> None:
        """Drains everything that is in flight."""
        self.state, _ = jax.block_until_ready(self.train.drain(self.state))


class Pipejax(Stepped):
    """A train step of pipejax over all hosts."""

    def __init__(
        self,
        problem: Trainable,
        width: int,
        all_reduce: AllReduce,
        *,
        weight_prediction: bool = True,
        shard_optimizer: bool = False,
        at_once: Linear | None = None,
    ) -> None:
        self.width = width
        self.train = pj.make_train_step(
            problem.loss,
            problem.optimizer,
            mesh=pj.data_mesh(),
            width=width,
            warmup_steps=(warmup := problem.warmup if width > 1 else 0),
            all_reduce=all_reduce,
            weight_prediction=weight_prediction,
            shard_optimizer=shard_optimizer,
            at_once=at_once,
            donate=True,
        )
        # Warm-up, pipeline and drain are compiled before any step is timed.
        self.state = self.train.init(problem.start)
        batch = problem.random_batch(jax.process_index())
        for _ in range(warmup + 1):
            self.step(batch)
        self.finish()
        self.state = self.train.init(problem.start)

    def params(self) -> Any:
        """Returns the parameters, without the gradients in flight.

        With a sharded optimizer, they are complete after a drain alone.
        """
        return jax.tree.map(lambda x: x.addressable_data(0), self.state.gathered)
