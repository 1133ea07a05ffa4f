"""Flax models in a train step: import `pipejax.flax.linen` or `pipejax.flax.nnx`."""

from . import _serialization as _serialization
