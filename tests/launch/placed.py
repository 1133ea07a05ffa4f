"""A program that a launcher starts: joins, and says who started it, and where it is."""

import sys

import jax

from pipejax import launch

place = launch.initialize(timeout=120)
said = f"{place.launcher}: {jax.process_index()} of {jax.process_count()}"
sys.stdout.write(said + "\n")
