"""Lists the switches of `jax.config` that change dtypes, checks or transfers."""

import contextlib

import jax

SWITCHES = {
    "strict promotion": ("jax_numpy_dtype_promotion", "strict"),
    "no rank promotion": ("jax_numpy_rank_promotion", "raise"),
    "debug nans": ("jax_debug_nans", True),
    "debug infs": ("jax_debug_infs", True),
    "leaks": ("jax_check_tracer_leaks", True),
    "checks": ("jax_enable_checks", True),
    "guard": ("jax_transfer_guard", "disallow"),
    "key reuse": ("jax_debug_key_reuse", True),
    "matmul": ("jax_default_matmul_precision", "highest"),
    "generator": ("jax_default_prng_impl", "rbg"),
}


@contextlib.contextmanager
def switched(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)
