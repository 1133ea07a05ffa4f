"""Measures the cost of snapshots in host memory, and of restoring a state from them."""
