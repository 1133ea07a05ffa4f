"""The optimizers that Optax exports by name, such as `optax.adam`."""

import jax
import jax.numpy as jnp
import optax

from ._optimizer import Optimizer, adam, sgd

ALIASES = {
    "adabelief": Optimizer(lambda: optax.adabelief(0.02)),
    "adadelta": Optimizer(lambda: optax.adadelta(1.0, rho=0.5)),
    "adafactor": Optimizer(lambda: optax.adafactor(0.05, min_dim_size_to_factor=2)),
    "adagrad": Optimizer(lambda: optax.adagrad(0.1)),
    "adam": Optimizer(adam),
    "adam, nesterov": Optimizer(lambda: optax.adam(0.02, nesterov=True)),
    "adamax": Optimizer(lambda: optax.adamax(0.02)),
    "adamaxw": Optimizer(lambda: optax.adamaxw(0.02, weight_decay=0.1)),
    "adamw": Optimizer(lambda: optax.adamw(0.02, weight_decay=0.1)),
    "adan": Optimizer(lambda: optax.adan(0.02)),
    "amsgrad": Optimizer(lambda: optax.amsgrad(0.02)),
    "fromage": Optimizer(lambda: optax.fromage(0.02)),
    "lamb": Optimizer(lambda: optax.lamb(0.02, weight_decay=0.1)),
    "lars": Optimizer(lambda: optax.lars(1.0, trust_coefficient=0.05)),
    "lbfgs without line search": Optimizer(
        lambda: optax.lbfgs(0.2, memory_size=1, linesearch=None)
    ),
    "lion": Optimizer(lambda: optax.lion(0.01, weight_decay=0.1)),
    "nadam": Optimizer(lambda: optax.nadam(0.02)),
    "nadamw": Optimizer(lambda: optax.nadamw(0.02, weight_decay=0.1)),
    "noisy_sgd": Optimizer(lambda: optax.noisy_sgd(0.05, key=jax.random.key(3))),
    "novograd": Optimizer(lambda: optax.novograd(0.02, weight_decay=0.1)),
    "optimistic_adam_v2": Optimizer(lambda: optax.optimistic_adam_v2(0.02)),
    "optimistic_gradient_descent": Optimizer(
        lambda: optax.optimistic_gradient_descent(0.1)
    ),
    "polyak_sgd": Optimizer(lambda: optax.polyak_sgd(0.2), takes_value=True),
    "polyak_sgd, sps+": Optimizer(
        lambda: optax.polyak_sgd(0.2, variant="sps+"), takes_value=True
    ),
    "radam": Optimizer(lambda: optax.radam(0.05, threshold=4.0)),
    "rmsprop": Optimizer(lambda: optax.rmsprop(0.01)),
    "rmsprop, centered, momentum": Optimizer(
        lambda: optax.rmsprop(0.01, centered=True, momentum=0.9)
    ),
    "rprop": Optimizer(lambda: optax.rprop(0.01)),
    "sgd": Optimizer(lambda: optax.sgd(0.1)),
    "sgd, momentum": Optimizer(sgd),
    "sgd, nesterov": Optimizer(lambda: optax.sgd(0.05, momentum=0.9, nesterov=True)),
    "sgd, momentum in bfloat16": Optimizer(
        lambda: optax.sgd(0.05, momentum=0.9, accumulator_dtype=jnp.bfloat16)
    ),
    "sign_sgd": Optimizer(lambda: optax.sign_sgd(0.01)),
    "signum": Optimizer(lambda: optax.signum(0.01)),
    "sm3": Optimizer(lambda: optax.sm3(0.1)),
    "yogi": Optimizer(lambda: optax.yogi(0.05)),
}
