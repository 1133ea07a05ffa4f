"""Checkpoints of a run, written with Orbax, including what is in flight.

`save` writes the whole `pj.PipelineState` or `pj.LocalState`. On the same number of
devices and at the same width, `restore` returns every bit of it, and the run ends as if
it had never stopped. On another number of devices, it first applies what is in flight.

A checkpoint is complete or absent. Orbax writes to a temporary folder beside the
checkpoints and renames it at the end, so a process that is killed during a save leaves
the previous checkpoint. `save` raises a `ValueError` before it writes anything if
`restore` could not return the state and the extras unchanged.
"""

from ._extras import PerProcess as PerProcess
from ._manager import manager as manager
from ._restore import Restored as Restored
from ._restore import restore as restore
from ._save import save as save
from ._snapshot import snapshot as snapshot
