"""The ways to train that are compared."""

import math
from collections.abc import Callable
from typing import Any

import jax

import pipejax as pj
from pipejax import codecs

# Codecs by name. Each is made from a key.
CODECS: dict[str, Callable[[jax.Array], codecs.Codec]] = {
    "bf16": lambda _: codecs.bf16(),
    "int8": lambda _: codecs.int8(),
    "int4": lambda _: codecs.int4(),
    "int4, fed back": lambda _: codecs.error_feedback(codecs.int4()),
    "int4, rotated": lambda key: codecs.rotated(codecs.int4(), key),
    "fp4": lambda _: codecs.fp4(),
    "int2, fed back": lambda _: codecs.error_feedback(codecs.int2()),
    "top 1 %, fed back": lambda _: codecs.error_feedback(codecs.top_k(0.01)),
    "PowerSGD 1, fed back": lambda key: codecs.error_feedback(codecs.power_sgd(1, key)),
    "PowerSGD 4, fed back": lambda key: codecs.error_feedback(codecs.power_sgd(4, key)),
    "sign, fed back": lambda _: codecs.error_feedback(codecs.sign()),
}
RANKS = (4, 8, 16)
# The arguments of `pj.make_train_step` by the name of a method. `warmup` is the share
# of the steps, at the start, that are synchronous. The least delay is that which hides
# an exchange that takes as long as the compute.
DELAYS: dict[str, dict[str, Any]] = {
    "K=2": {},
    "K=2, own": {"weight_prediction": "own"},
    "K=2, plain": {"weight_prediction": False},
    **{f"K=2, rank {rank} at once": {"at_once": rank} for rank in RANKS},
    "K=2, least delay": {"delayed": "least"},
    "K=2, warm-up": {"warmup": 0.1},
    "K=2, warm-up, rank 16 at once": {"warmup": 0.1, "at_once": 16},
    **{
        f"K=2, rank 16 at once, {codec}": {"at_once": 16, "codec": codec}
        for codec in ("int8", "int4, fed back")
    },
}
CODED: dict[str, dict[str, Any]] = {
    f"K={width}, {codec}": {"width": width, "codec": codec}
    for codec in CODECS
    for width in (1, 2)
}
METHODS = {"K=1": {"width": 1}, **DELAYS, **CODED}


def settings(method: str, seed: int, steps: int) -> dict[str, Any]:
    """Returns the arguments of `pj.make_train_step` for a method."""
    found, key = dict(METHODS[method]), jax.random.key(seed)
    if warmup := found.pop("warmup", None):
        found["warmup_steps"] = round(warmup * steps)
    if rank := found.get("at_once"):
        found["at_once"] = codecs.power_sgd(rank, key)
    if codec := found.pop("codec", None):
        # Codecs that need whole matrices cannot encode pieces, as `two_shot` does.
        whole = codec.startswith("PowerSGD")
        algorithm = pj.collectives.psum if whole else pj.collectives.two_shot
        found["all_reduce"] = algorithm(CODECS[codec](key))
    return found


def is_same_for_all(method: str) -> bool:
    """Returns whether results do not depend on the number of replicas."""
    found = METHODS[method]
    predicts = "at_once" not in found and found.get("weight_prediction") is not False
    return method == "K=1" or (not predicts and "codec" not in found)


def bytes_of(codec: str, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Returns the bytes that a device sends for one gradient."""
    made = CODECS[codec](jax.random.key(0))
    return made.of(shapes).size(sum(map(math.prod, shapes)))
