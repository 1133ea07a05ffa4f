"""Joins the processes of a job, and ends the job when one of them fails or stalls.

- `detect` reads from the environment which process of its job this one is.
- `initialize` joins this process to all others, after a roll call that names every
  process that is missing or different.
- `Watchdog` ends all processes of a job in which one dies or stands still, and names
  that process.

The command `pipejax launch` starts the processes of a job.
"""

from ._detect import detect as detect
from ._initialize import initialize as initialize
from ._monitor import FAULT as FAULT
from ._place import Place as Place
from ._roll_call import RollCallError as RollCallError
from ._watchdog import Watchdog as Watchdog
