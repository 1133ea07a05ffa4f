"""Joins the processes of a launcher, and prints its name and this process's rank."""

import sys

import jax

from pipejax import launch


def main():
    place = launch.initialize(timeout=120)
    rank, count = jax.process_index(), jax.process_count()
    sys.stdout.write(f"{place.launcher}: {rank} of {count}\n")


if __name__ == "__main__":
    main()
