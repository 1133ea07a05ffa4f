"""Experiments with an optimizer that is sharded over the data (ZeRO-1)."""
