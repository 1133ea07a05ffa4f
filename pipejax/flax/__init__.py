"""Flax models in and out of a train step: `linen` and `nnx`, imported on demand."""
