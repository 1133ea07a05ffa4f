"""`python -m pipejax.cli`."""

import sys

from . import main

sys.exit(main())
