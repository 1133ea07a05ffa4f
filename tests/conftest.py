"""Eight CPU devices and strict rank promotion, set before the first JAX call.

Hypothesis generates the same few cases each time; with `--hypothesis-profile=soak` many
more, and others each time: `make soak`.

The devices share one pool of threads, and of two programs in flight each may hold those
that the other's all-reduce waits for: a pool of twice the devices is enough for both.

What has been compiled is kept in pytest's cache, for all workers, for the processes
that tests start and for the next run: `pytest --cache-clear` begins anew.
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
import pytest

from .cost import Costs

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


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs")
    kept = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    for name, value in kept.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
