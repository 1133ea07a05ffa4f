"""Eight CPU devices and strict rank promotion, set before the first JAX call.

Dispatch is synchronous: the devices share one pool of threads, and of two programs in
flight each may hold the threads that the other's all-reduce waits for.
"""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_numpy_rank_promotion", "raise")
