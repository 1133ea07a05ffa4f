"""
Sets eight CPU devices and strict rank promotion before the first call of JAX.

Hypothesis generates the same few cases each time. `make soak` passes
`--hypothesis-profile=soak`, which generates many more, and others each time.

The devices share one pool of threads. Two programs in flight could each hold threads
that the other's all-reduce waits for. A pool of twice the devices is enough for both.

Compiled programs are kept in pytest's cache for all workers, for the processes that
tests start, and for the next run. `pytest --cache-clear` starts with an empty cache.
"""

import gc
import os
import tempfile
import zlib
from collections.abc import Iterator

os.environ["NPROC"] = "16"
# The processes that tests start need this too: the compilers for absent accelerators
# are installed, so JAX would look for the accelerators.
os.environ["JAX_PLATFORMS"] = "cpu"
# Hypothesis would store what it has read of the sources in the repository.
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
    deadline=None,  # the first example of each test compiles
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


# Tracing makes many small objects. Collecting garbage less often saves time.
gc.set_threshold(100_000, 20, 100)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Fails a test that leaves a variable with another value to the tests after it.

    Libraries add variables when they are first imported, which is no fault of a test.
    """
    before = dict(os.environ)
    yield
    changed = {name for name in before if os.environ.get(name) != before[name]}
    changed -= {"PYTEST_CURRENT_TEST"}
    os.environ.update({name: before[name] for name in changed})
    assert changed == set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="run at most N cases of each parametrized test",
    )


@pytest.hookimpl(trylast=True)  # after the marker expression of `-m`
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """With `--cases N`, keeps of each test the N cases whose names hash lowest.

    A hash spreads over the parameters: the first cases would often be the simplest.
    """
    most = config.getoption("--cases")
    if most is None:
        return
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {
        item for cases in found.values() for item in sorted(cases, key=_hash)[:most]
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _hash(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs")
    kept = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    for name, value in kept.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
