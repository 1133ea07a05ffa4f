"""Local steps: `pj.make_local_step`, in which hosts exchange in rounds."""

from typing import Any

import jax

import pipejax as pj
from pipejax.collectives import AllReduce, psum

from ._pipejax import Stepped
from ._problem import Problem


class Local(Stepped):
    """Local steps of all hosts, whose mean is the outer optimizer."""

    def __init__(
        self,
        problem: Problem,
        sync_every: int,
        overlap_steps: int,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self.sync_every = sync_every
        self.train = pj.make_local_step(
            problem.loss,
            problem.optimizer,
            mesh=pj.data_mesh(),
            sync_every=sync_every,
            overlap_steps=overlap_steps,
            all_reduce=all_reduce or psum(),
        )
        self.state = self.train.init(problem.start)

    def params(self) -> Any:
        """Returns the anchor."""
        return jax.tree.map(lambda x: x.addressable_data(0), self.state.params)
