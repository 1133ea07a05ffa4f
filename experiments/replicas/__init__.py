"""How training depends on the number of replicas that share a batch."""
