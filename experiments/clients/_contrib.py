"""The optimizers of `optax.contrib`."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from ._optimizer import Optimizer, adam, plateau


def _sam() -> optax.GradientTransformation:
    ascent = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.sgd(0.1), ascent)


def _squares() -> optax.GradientTransformation:
    """Estimates the diagonal of the Hessian from gradients alone, for Sophia."""
    return optax.stateless(lambda updates, _: jax.tree.map(jnp.square, updates))


CONTRIB = {
    "acprop": Optimizer(lambda: contrib.acprop(0.02, eps=0.1)),
    "ademamix": Optimizer(lambda: contrib.ademamix(0.02)),
    "adopt": Optimizer(lambda: contrib.adopt(0.02)),
    "cocob": Optimizer(contrib.cocob),
    "dadapt_adamw": Optimizer(lambda: contrib.dadapt_adamw(1.0, estim_lr0=0.01)),
    "dog": Optimizer(lambda: contrib.dog(1.0, init_step=("heuristic", 0.01))),
    "dowg": Optimizer(lambda: contrib.dowg(1.0, init_estim_sq_dist=0.01)),
    "galore": Optimizer(lambda: contrib.galore(0.02, rank=2, update_proj_gap=4)),
    "madgrad": Optimizer(lambda: contrib.madgrad(0.02)),
    "mechanize": Optimizer(lambda: contrib.mechanize(adam(), s_init=0.1)),
    "momo": Optimizer(lambda: contrib.momo(0.1), takes_value=True),
    "momo_adam": Optimizer(lambda: contrib.momo_adam(0.02), takes_value=True),
    "muon": Optimizer(lambda: contrib.muon(0.02)),
    "prodigy": Optimizer(lambda: contrib.prodigy(1.0, estim_lr0=0.01)),
    "reduce_on_plateau after adam": Optimizer(plateau, takes_value=True),
    "sam": Optimizer(
        _sam, refused={"width 2 plain": "sam where gradients are applied late"}
    ),
    "schedule_free": Optimizer(
        lambda: contrib.schedule_free(optax.rmsprop(0.02), 0.02, b1=0.9)
    ),
    "schedule_free_adamw": Optimizer(lambda: contrib.schedule_free_adamw(0.02)),
    "schedule_free_sgd": Optimizer(lambda: contrib.schedule_free_sgd(0.1)),
    "simplified_ademamix": Optimizer(lambda: contrib.simplified_ademamix(0.02)),
    "sophia, squared gradients for a Hessian": Optimizer(
        lambda: contrib.sophia(0.02, update_interval=2, hessian_diagonal_fn=_squares())
    ),
    "split_real_and_imaginary of adam": Optimizer(
        lambda: contrib.split_real_and_imaginary(adam())
    ),
}
