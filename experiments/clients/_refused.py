"""Optimizers that a train step cannot run, and parts of the error messages."""

import optax
from optax import contrib

from ._optimizer import Optimizer, adam, sgd


def _always(message: str) -> dict[str, str]:
    return dict.fromkeys(("width 1", "width 2 plain", "width 2 predicted"), message)


REFUSED = {
    "differentially_private_aggregate": Optimizer(
        lambda: contrib.differentially_private_aggregate(1.0, 1.0, key=0),
        refused=_always("differentially_private_aggregate, which needs the gradient"),
    ),
    "lbfgs": Optimizer(optax.lbfgs, refused=_always("must need nothing but gradients")),
    "lookahead of sgd": Optimizer(
        lambda: optax.lookahead(sgd(), 5, 0.5),
        refused=_always("optax.lookahead, whose parameters are pairs"),
    ),
    "monitor after adam": Optimizer(
        lambda: optax.chain(adam(), optax.monitor({"norm": optax.tree.norm})),
        refused=_always("must keep the structure of its state"),
    ),
    "sam, opaque_mode": Optimizer(
        lambda: contrib.sam(sgd(), sgd(), opaque_mode=True),
        refused=_always("sam with opaque_mode=True"),
    ),
    "scale_by_backtracking_linesearch after sgd": Optimizer(
        lambda: optax.chain(
            optax.sgd(1.0),
            optax.scale_by_backtracking_linesearch(max_backtracking_steps=5),
        ),
        refused=_always("must need nothing but gradients"),
    ),
    "sophia": Optimizer(
        lambda: contrib.sophia(0.02),
        refused=_always("hutchinson_estimator_diag_hessian, which needs the loss"),
    ),
}
