"""All that only a GPU can tell, by one command: `python -m experiments.gpu`."""
