"""Validation of codecs as arguments."""

import warnings
from typing import Any

from ._cast import AllBits
from ._codec import Codec, Linear


def check_codec(codec: Any) -> Codec:
    """Validates a `codec` argument and returns the codec to use.

    Call it directly in the function that the user calls: the warning points to the line
    of that call.

    Args:
      codec: A `Codec`, or `None` to send every bit of each vector.

    Returns:
      `codec`, or a codec that sends every bit if `codec` is `None`.

    Warns:
      UserWarning: If the codec is biased and is not wrapped in `error_feedback`.

    Raises:
      ValueError: If `codec` is neither a `Codec` nor `None`.
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
            f"{type(codec).__name__} is biased: the values that it loses add up over"
            " the steps. Use pj.codecs.error_feedback(codec), which sends them later.",
            stacklevel=3,
        )
    return codec


def check_inner(argument: str, codec: Any) -> Codec:
    """Validates an argument of a codec that encodes other vectors with `codec`."""
    if isinstance(codec, Linear) or not isinstance(codec, Codec):
        raise ValueError(
            f"`{argument}` must be a codec such as pj.codecs.int4(), neither linear nor"
            f" with error feedback; got {codec!r}. Error feedback goes outside: put the"
            " whole codec into pj.codecs.error_feedback."
        )
    return codec
