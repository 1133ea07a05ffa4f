"""Runs the command line as `python -m pipejax.cli`."""

import sys

from . import main

sys.exit(main())
