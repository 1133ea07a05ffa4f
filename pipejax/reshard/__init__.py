r"""Moves a train state from p devices to another number of devices, p'.

Parameters and optimizer state are replicated and stay as they are. This module converts
what differs between devices:

- Messages in flight, and deviations. Each new device gets the mean over the old
  devices, so that the mean over the new devices is the same.
- Gradients, loss and metrics in flight, if the loss function returns weights W. The
  mean gradient is then `sum(W g) / sum(W)`, and the sum of a batch's weights does not
  depend on the number of devices. The new devices therefore get equal shares of the sum
  over the old devices.

During the conversion, every new device holds the messages of all old devices. The
states of codecs are not moved. `Spread` says whether the new devices can use them.
"""

from ._reshard import reshard as reshard
from ._reshard import shapes_on as shapes_on
from ._spread import Spread as Spread
