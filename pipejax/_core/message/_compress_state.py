"""The state of a codec in a training loop that sends nothing."""

from typing import Any, NamedTuple


class CompressState(NamedTuple):
    """State of `pj.transforms.compress`. Each device has its own.

    Attributes:
      codec: The state of the codec, such as residuals and keys.
    """

    codec: Any
