"""What runs between `train.step` and a collective or the optimizer. Private."""
