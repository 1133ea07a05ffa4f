"""What snapshots in host memory cost, and how fast a state comes back from them."""
