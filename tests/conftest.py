"""Eight CPU devices and strict rank promotion, set before the first JAX call.

Hypothesis generates the same few cases each time; with `--hypothesis-profile=soak` many
more, and others each time: `make soak`.

The devices share one pool of threads, and of two programs in flight each may hold those
that the other's all-reduce waits for: a pool of twice the devices is enough for both.
"""

import os
import tempfile

os.environ["NPROC"] = "16"
# Also for the processes that tests start: the compilers for absent accelerators are
# installed, and JAX would look for the accelerators.
os.environ["JAX_PLATFORMS"] = "cpu"
# Hypothesis would keep what it has read of the sources in the repository.
os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.gettempdir() + "/hypothesis"

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "ci",
    max_examples=3,
    deadline=None,  # the first case of each test compiles
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "soak",
    hypothesis.settings.get_profile("ci"),
    max_examples=250,
    derandomize=False,
    print_blob=True,
)
hypothesis.settings.load_profile("ci")
