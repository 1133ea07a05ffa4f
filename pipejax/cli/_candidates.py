"""Codecs by the names that a command line gives, made as training would use them."""

from collections.abc import Iterable

from pipejax import codecs


def candidates(names: Iterable[str]) -> dict[str, codecs.Codec]:
    """Makes codecs by name, with error feedback for those that need it.

    Args:
      names: Keys of `pj.codecs.NAMES`.

    Returns:
      The codecs, by name.

    Raises:
      ValueError: If no codec has one of the names.
    """
    found = {name: codecs.named(name) for name in names}
    return {
        name: codecs.error_feedback(codec) if codec.needs_feedback else codec
        for name, codec in found.items()
    }
