"""The codecs that a command line names, each as training would use it."""

from collections.abc import Iterable

from pipejax import codecs


def candidates(names: Iterable[str]) -> dict[str, codecs.Codec]:
    """Makes codecs by name, with error feedback where training may fail without.

    Raises:
      ValueError: for a name that no codec has.
    """
    found = {name: codecs.named(name) for name in names}
    return {
        name: codecs.error_feedback(codec) if codec.needs_feedback else codec
        for name, codec in found.items()
    }
