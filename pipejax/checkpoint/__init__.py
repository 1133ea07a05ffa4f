"""Checkpoints of a run, written with Orbax, including its gradients in flight.

`save` writes the whole `pj.PipelineState`. What `restore` does with it depends on the
train step that continues the run:

- The same width and the same number of devices: `restore` returns every bit of the
  state, including the gradients in flight, and the run ends as if it had never stopped.
- Another number of devices: `restore` averages the gradients in flight over the old
  devices and applies them (a drain) before the run continues. The states of codecs,
  such as the residuals of error feedback, begin anew.
- Another width, another optimizer, or a loss function that returns other values than
  those in flight: `restore` raises a `ValueError` that names the remedy.

A checkpoint is complete or absent. Orbax writes to a temporary folder beside the
checkpoints and renames it at the end, so a process that is killed during a save leaves
the previous checkpoint. `save` raises a `ValueError` before it writes anything if
`restore` could not return the state and the extras unchanged.
"""

from ._manager import manager as manager
from ._restore import Restored as Restored
from ._restore import restore as restore
from ._save import save as save
