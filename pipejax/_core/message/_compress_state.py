"""The state of `pj.transforms.compress`."""

from typing import Any, NamedTuple


class CompressState(NamedTuple):
    """State of a codec whose payloads are decoded without being sent.

    Each device has its own.

    Attributes:
      codec: The state of the codec, such as residuals and keys.
    """

    codec: Any
