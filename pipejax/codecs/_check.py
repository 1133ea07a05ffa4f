"""The argument `codec` of whatever sends vectors."""

import warnings
from typing import Any

from ._all_bits import AllBits
from ._codec import Codec


def check_codec(codec: Any) -> Codec:
    """Returns the codec, and for `None` one that sends all bits.

    Call it in the function that a user calls: a warning names that function's caller.

    Warns:
      UserWarning: for a biased codec without error feedback.

    Raises:
      ValueError: for anything else.

    >>> check_codec(None).size(3)
    12
    """
    if codec is None:
        return AllBits()
    if not isinstance(codec, Codec):
        raise ValueError(
            "`codec` must be a codec such as pj.codecs.int8(), or None to send all"
            f" bits; got {codec!r}."
        )
    if codec.needs_feedback:
        warnings.warn(
            f"{type(codec).__name__} is biased: what it loses adds up over the steps."
            " Wrap it, pj.codecs.error_feedback(codec), so that it is sent later.",
            stacklevel=3,
        )
    return codec
