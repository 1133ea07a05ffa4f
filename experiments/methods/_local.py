"""Local steps: `pj.make_local_step`, in which hosts exchange in rounds."""

from typing import Any, Literal

import jax

import pipejax as pj
from pipejax.collectives import AllReduce, psum

from ._method import Trainable
from ._pipejax import Stepped


class Local(Stepped):
    """Local steps of all hosts, whose mean is the outer optimizer.

    Attributes:
      sync_every: The number of steps of a round.
    """

    def __init__(
        self,
        problem: Trainable,
        sync_every: int | Literal["auto"],
        overlap_steps: int | None = None,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self.train = pj.make_local_step(
            problem.loss,
            problem.optimizer,
            mesh=pj.data_mesh(),
            sync_every=sync_every,
            overlap_steps=overlap_steps,
            all_reduce=all_reduce or psum(),
            donate=True,
        )
        batch = problem.random_batch(jax.process_index())
        first = self.train.init(problem.start, batch=self.train.batch(batch))
        self.sync_every: int = first.shared.form.schedule.sync_every
        # A round and its drain are compiled before any step is timed.
        self.state = jax.tree.map(lambda x: x.copy(), first)
        for _ in range(self.sync_every + 1):
            self.step(batch)
        self.finish()
        self.state = first

    def params(self) -> Any:
        """Returns the anchor."""
        return jax.tree.map(lambda x: x.addressable_data(0), self.state.params)
