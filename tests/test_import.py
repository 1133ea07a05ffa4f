"""Tests what imports load, and that they leave the devices alone."""

import json
import pathlib
import subprocess
import sys

import pytest


def modules_after(statement):
    """Returns the modules that a fresh process has loaded after a statement."""
    code = f"{statement}; import json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def added():
    """Returns the modules that `import pipejax` adds to those of JAX and Optax."""
    return modules_after("import pipejax") - modules_after("import jax, optax")


def test_import_loads_no_library_beyond_jax_and_optax(added):
    packages = {name.partition(".")[0] for name in added}
    foreign = packages - sys.stdlib_module_names - {"pipejax", "jax", "jaxlib"}
    assert not foreign, f"import these where they are used: {sorted(foreign)}"


def test_import_loads_neither_pallas_nor_jax_extend(added):
    """`jax.extend` loads Pallas, and takes as long as 40 files of pipejax."""
    assert {name for name in added if name.startswith("jax.extend")} == set()
    assert {name for name in added if name.startswith("jax._src.pallas")} == set()


def test_programs_of_several_processes_ask_for_no_device_when_imported():
    """JAX joins no processes once a program has asked for a device."""
    root = pathlib.Path(__file__).parents[1]
    calls = ("member.join()", "launch.initialize(")
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in sorted(root.glob("experiments/**/*.py"))
        if any(call in path.read_text() for call in calls)
    ]
    assert "experiments.gpu._hosts" in names
    asked = "from jax._src import xla_bridge; assert not xla_bridge._backends"
    subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}; {asked}"], check=True
    )
