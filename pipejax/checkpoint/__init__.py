"""Checkpoints by Orbax: exact on the same devices, drained on others.

- same width, same number of devices: every bit comes back, gradients in flight
  included, and the run ends as if it had never stopped
- another number of devices: what each had for itself is handed on (`reshard`), and what
  is in flight applied (drained) before the run goes on
- another width: refused

Nothing is written half: Orbax writes beside the checkpoint and renames at the end, so a
process killed during a save leaves the one before. A state or an extra that would not
come back as it was is refused before anything is written.
"""

from ._manager import manager as manager
from ._restore import Restored as Restored
from ._restore import restore as restore
from ._save import save as save
