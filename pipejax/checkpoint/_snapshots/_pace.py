r"""How many steps lie between two snapshots.

A snapshot stops the training for C seconds, and then takes B seconds of copying and
sending beside it. Let s be the seconds of a step and M the mean seconds from one fault
to the next. Then the seconds between two snapshots are

$$T = \max(C / 0.01, \; \sqrt{2 (C + B / 5) M})$$

The first bounds the share of the time for which snapshots stop the training. The second
is where their cost, (C + B / 5) / T, equals that of the steps that a fault makes be
done again, T / (2 M). A second of copying beside the training is taken to cost a fifth
of a second. Source: J. W. Young, A first order approximation to the optimum checkpoint
interval, Communications of the ACM 17(9), 1974.
"""

import math

SHARE = 0.01
"""The largest share of the time for which snapshots stop the training."""
BESIDE = 0.2
"""The seconds of training that a second of copying beside it is taken to cost."""
FIRST = 8
"""The steps between the first two snapshots, when nothing has been measured."""


def steps_between(
    stops: float, beside: float, step: float, faults_per_hour: float
) -> int:
    """Returns the number of steps between two snapshots, at least 1.

    Args:
      stops: The seconds for which a snapshot stops the training.
      beside: The seconds that it takes beside the training.
      step: The seconds of a step.
      faults_per_hour: The number of faults that are expected in an hour.
    """
    mean = 3600.0 / faults_per_hour
    cost = stops + BESIDE * beside
    seconds = max(stops / SHARE, math.sqrt(2.0 * cost * mean))
    return max(1, math.ceil(seconds / max(step, 1e-6)))
