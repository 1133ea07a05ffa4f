"""Flax models in a train step: import `pipejax.flax.linen` or `pipejax.flax.nnx`."""
