"""Runs the command line as `python -m pipejax`."""

import sys

from pipejax.cli import main

sys.exit(main())
