"""Experiments in the tests' own process: what it has imported and compiled is used."""

import contextlib
import io
import runpy
import sys
import warnings

import jax


def limit_devices(monkeypatch):
    """Gives an experiment that sets a number of devices so many of those there are.

    Their number is fixed once JAX has begun. `jax.devices` returns the first of them.
    """
    devices, before = jax.devices(), jax.config.update

    def update(name, value):
        if name == "jax_num_cpu_devices":
            assert value <= len(devices)
            monkeypatch.setattr(jax, "devices", lambda *_: devices[:value])
        elif name.startswith("jax_persistent_cache"):  # by JAX itself, when it begins
            before(name, value)
        else:
            assert (name, value) == ("jax_platforms", "cpu")

    monkeypatch.setattr(jax.config, "update", update)


def run(monkeypatch, name, *flags):
    """Does what `python -m experiments.NAME FLAGS` does, and returns what it prints."""
    limit_devices(monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as out:
        # Another test may have imported the module, which is then made a second time.
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        try:
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"it has ended with {end.code}") from end
    return out.getvalue()
