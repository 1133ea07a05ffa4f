"""Tests that every process of a CPU job writes its programs to the cache."""

import json
import subprocess
import sys

import pytest

from ..launch.helpers import free_port

pytestmark = pytest.mark.full

PROGRAM = """
import json, sys
import jax
import jax.numpy as jnp
from jax import monitoring
import pipejax as pj

rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
found = []
monitoring.register_event_listener(lambda event, **_: found.append(event))
pj.launch.initialize(f"127.0.0.1:{port}", 2, rank)
f = jax.jit(lambda x: jnp.sin(x) + 2)
jax.block_until_ready(f(jax.device_put(1.0, jax.local_devices()[0])))
hits = found.count("/jax/compilation_cache/cache_hits")
print(json.dumps({"hits": hits, "process": jax.process_index()}), flush=True)
"""


def run(folder):
    """Returns what both processes say."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [json.loads(each.communicate()[0].splitlines()[-1]) for each in processes]


def test_programs_of_all_processes_are_found_again(tmp_path):
    assert [each["hits"] for each in run(tmp_path)] == [0, 0]
    again = run(tmp_path)
    assert [each["process"] for each in again] == [0, 1]
    assert min(each["hits"] for each in again) > 0
