"""Private: everything that runs between `train.step` and a collective or an update."""
