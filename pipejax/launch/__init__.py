"""From one process to many hosts: who started it, and how they join."""

from ._detect import detect as detect
from ._initialize import initialize as initialize
from ._patrol import FAULT as FAULT
from ._place import Place as Place
from ._roll_call import RollCallError as RollCallError
from ._watchdog import Watchdog as Watchdog
