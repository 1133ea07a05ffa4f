"""The work of simulated steps, whose times vary."""

import dataclasses
import math

import numpy as np

from pipejax._internal.numbers import number
from pipejax.codecs import Codec

from ._checks import check_elements, check_seconds, store
from ._rounds import Algorithm

# The largest jitter. Beyond it, the mean of the times comes from steps so long and rare
# that few simulations would contain one: at 2, 1 step in 44 makes half of the mean.
MOST_JITTER = 2


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of every simulated step, and how much its time varies.

    Attributes:
      seconds: The mean seconds that a device computes in a step.
      elements: The number of float32 elements of a gradient.
      algorithm: The algorithm of the all-reduce over all devices.
      codec: The codec of the payloads; `None` sends float32.
      speed: The name of the codec in `Cluster.codecs`. `None` counts no time for
        encoding and decoding.
      jitter: The standard deviation of the logarithm of a step's compute time, at most
        2. 0 makes all steps equally long.
      slow: For each device, the factor on its compute time; `None` is 1 for all.

    Raises:
      ValueError: If `seconds`, `elements`, `jitter` or a factor in `slow` is out of
        range.
    """

    seconds: float
    elements: int
    algorithm: Algorithm = "psum"
    codec: Codec | None = None
    speed: str | None = None
    jitter: float = 0.0
    slow: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        seconds = check_seconds("seconds", self.seconds)
        store(self, seconds=seconds, elements=check_elements("elements", self.elements))
        if not 0 <= number(self.jitter) <= MOST_JITTER:
            raise ValueError(
                f"`jitter` must be from 0 to {MOST_JITTER}, got {self.jitter!r:.40}. At"
                " 0.1, steps vary by 10 %."
            )
        for factor in () if self.slow is None else self.slow:
            if not 0 <= number(factor) < math.inf:
                raise ValueError(
                    "`slow` must have finite factors of at least 0, got"
                    f" {factor!r:.40}. 1 is for a device like the others."
                )

    def compute_times(
        self, steps: int, devices: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Draws the compute time of each step on each device.

        Args:
          steps: The number of steps.
          devices: The number of devices.
          rng: The generator that the jitter is drawn from.

        Returns:
          Seconds [steps, devices]. Their expected value is `seconds` times `slow`, for
          any jitter.

        Raises:
          ValueError: If `slow` does not have one number for each device.
        """
        # The mean of exp(normal(m, j)) is exp(m + j^2 / 2), which is 1 for this m.
        noise = rng.normal(-(self.jitter**2) / 2, self.jitter, (steps, devices))
        slow = np.ones(devices) if self.slow is None else np.asarray(self.slow)
        if slow.shape != (devices,):
            raise ValueError(
                f"`slow` must have one number for each of {devices} devices, got"
                f" {slow.size}."
            )
        return self.seconds * np.exp(noise) * slow
