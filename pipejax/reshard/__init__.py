r"""Moves a train state from p devices to another number of devices, p'.

Parameters and optimizer state are replicated and stay as they are. This module converts
what differs between devices:

- Messages in flight, and deviations. Each new device gets the mean over the old
  devices, so that the mean over the new devices is the same.
- Residuals of error feedback, `e_i` on device i. The new devices get equal shares of

  $$p'/p \sum_i e_i$$

  When residuals are sent, they change a mean gradient by their sum divided by the
  number of devices. This quotient is the same on p' devices as on p devices.
- Gradients, loss and metrics in flight, and residuals, if the loss function returns
  weights W. The mean gradient is then `sum(W g) / sum(W)`, and the sum of a batch's
  weights does not depend on the number of devices. The new devices therefore get equal
  shares of the sum over the old devices.
- Keys and warm starts of codecs. They start again from their initial values.

During the conversion, every new device holds the values of all old devices.

The messages in flight show whether the loss function returns weights. At width 1 there
are no messages in flight, and residuals are converted as if there were no weights.
"""

from ._reshard import reshard as reshard
from ._reshard import shapes_on as shapes_on
from ._residuals import sum_owed as sum_owed
from ._spread import Spread as Spread
