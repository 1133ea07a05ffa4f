"""Measures all that only a GPU can show: `python -m experiments.gpu`."""
