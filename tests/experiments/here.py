"""Runs experiments in the tests' own process, which has imported and compiled a lot."""

import contextlib
import io
import runpy
import sys
import warnings

import jax


def limit_devices(monkeypatch):
    """Gives an experiment that sets a number of devices the first of the present ones.

    The number of devices is fixed once JAX has begun, so `jax.devices` is replaced.
    """
    devices, before = jax.devices(), jax.config.update

    def update(name, value):
        if name == "jax_num_cpu_devices":
            assert value <= len(devices)
            monkeypatch.setattr(jax, "devices", lambda *_: devices[:value])
        # JAX sets these itself when it begins.
        elif name.startswith("jax_persistent_cache"):
            before(name, value)
        else:
            assert (name, value) == ("jax_platforms", "cpu")

    monkeypatch.setattr(jax.config, "update", update)


def run(monkeypatch, name, *flags):
    """Does what `python -m experiments.NAME FLAGS` does, and returns what it prints."""
    limit_devices(monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as out:
        # Another test may have imported the module already, and `runpy` then loads it
        # again.
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        try:
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"it has ended with {end.code}") from end
    return out.getvalue()
