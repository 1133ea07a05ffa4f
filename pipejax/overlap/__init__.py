"""Proof that communication is hidden: schedules, read and drawn."""

from ._inspect import inspect as inspect
from ._report import Collective as Collective
from ._report import Report as Report
