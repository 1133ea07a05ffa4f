"""Optimizers that wrap other optimizers, and chains of gradient transformations."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from optax import contrib

from ._optimizer import STEPS, Optimizer, adam, plateau, sgd


def _spoilt(batches: list[Any]) -> list[Any]:
    """Replaces the targets of one example by NaN: of batch 5, on the third device."""
    spoilt = batches[4] | {"y": batches[4]["y"].copy()}
    spoilt["y"][9] = np.nan
    return [*batches[:4], spoilt, *batches[5:]]


def _by_name(params: Any) -> dict[str, str]:
    return {name: "matrix" if params[name].ndim == 2 else "bias" for name in params}


WRAPPERS = {
    "MultiSteps of adam": Optimizer(lambda: optax.MultiSteps(adam(), 2)),
    "MultiSteps of adam and reduce_on_plateau": Optimizer(
        lambda: optax.MultiSteps(plateau(), 2), takes_value=True
    ),
    "MultiSteps of adam, skip_large_updates": Optimizer(
        lambda: optax.MultiSteps(
            adam(),
            2,
            should_skip_update_fn=functools.partial(
                optax.skip_large_updates, max_squared_norm=4.0
            ),
        )
    ),
    "apply_every 2, after scale": Optimizer(
        lambda: optax.chain(optax.scale(-0.1), optax.apply_every(2))
    ),
    "apply_if_finite of adam, a batch with NaN": Optimizer(
        lambda: optax.apply_if_finite(adam(), 2),
        batches=_spoilt,
        settings={"skip_nonfinite": False},
    ),
    "conditionally_mask of sgd": Optimizer(
        lambda: optax.conditionally_mask(sgd(), lambda step: step % 3 > 0)
    ),
    "conditionally_transform of scale_by_adam, scale": Optimizer(
        lambda: optax.chain(
            optax.conditionally_transform(
                optax.scale_by_adam(), lambda step: step % 3 > 0
            ),
            optax.scale(-0.02),
        )
    ),
    "flatten of adam": Optimizer(lambda: optax.flatten(adam())),
    "freeze a matrix": Optimizer(
        lambda: optax.chain(
            adam(), optax.freeze({"hidden": True, "bias": False, "out": False})
        )
    ),
    "inject_hyperparams of adamw, cosine schedule": Optimizer(
        lambda: optax.inject_hyperparams(optax.adamw)(
            learning_rate=optax.cosine_decay_schedule(0.05, STEPS), weight_decay=0.1
        )
    ),
    "masked weight decay": Optimizer(
        lambda: optax.adamw(
            0.02,
            weight_decay=0.1,
            mask={"hidden": True, "bias": False, "out": True},
        )
    ),
    "named_chain": Optimizer(
        lambda: optax.named_chain(("clip", optax.clip(0.05)), ("adam", adam()))
    ),
    "partition into muon and adam": Optimizer(
        lambda: optax.partition(
            {"matrix": contrib.muon(0.02), "bias": adam()}, _by_name
        )
    ),
    "selective_transform": Optimizer(
        lambda: optax.selective_transform(
            adam(), freeze_mask={"hidden": False, "bias": True, "out": False}
        )
    ),
    "snapshot": Optimizer(
        lambda: optax.chain(adam(), optax.snapshot("norm", optax.tree.norm))
    ),
}
CHAINS = {
    "add_noise, momentum": Optimizer(
        lambda: optax.chain(optax.add_noise(0.01, 0.5, key=jax.random.key(7)), sgd())
    ),
    "adaptive_grad_clip, momentum": Optimizer(
        lambda: optax.chain(optax.adaptive_grad_clip(0.1), sgd())
    ),
    "add_decayed_weights, momentum": Optimizer(
        lambda: optax.chain(optax.add_decayed_weights(0.1), sgd())
    ),
    "centralize, adam": Optimizer(lambda: optax.chain(optax.centralize(), adam())),
    "clip, momentum": Optimizer(lambda: optax.chain(optax.clip(0.05), sgd())),
    "clip_by_block_rms, adam": Optimizer(
        lambda: optax.chain(optax.clip_by_block_rms(0.05), adam())
    ),
    "clip_by_global_norm, adamw, warm-up and cosine": Optimizer(
        lambda: optax.chain(
            optax.clip_by_global_norm(0.2),
            optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.05, 3, STEPS)),
        )
    ),
    "ema, sgd": Optimizer(lambda: optax.chain(optax.ema(0.5), optax.sgd(0.1))),
    "keep_params_nonnegative after sgd": Optimizer(
        lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())
    ),
    "momentum, one-cycle schedule": Optimizer(
        lambda: optax.sgd(optax.linear_onecycle_schedule(STEPS, 0.2), momentum=0.9)
    ),
    "normalize_by_update_norm, sgd": Optimizer(
        lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.05))
    ),
    "zero_nans, adam, a batch with NaN": Optimizer(
        lambda: optax.chain(optax.zero_nans(), adam()),
        batches=_spoilt,
        settings={"skip_nonfinite": False},
    ),
}
