"""Eight CPU devices and strict rank promotion, set before the first JAX call.

The devices share one pool of threads, and of two programs in flight each may hold those
that the other's all-reduce waits for: a pool of twice the devices is enough for both.
"""

import os

os.environ["NPROC"] = "16"
# Also for the processes that tests start: the compilers for absent accelerators are
# installed, and JAX would look for the accelerators.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
