"""Writes a pytree of bools as short as `delayed` of `pj.make_train_step` takes it."""

from typing import Any


def merged_flags(flags: Any) -> Any:
    """Returns a pytree with one bool in place of a subtree whose bools are all equal.

    Examples:
      >>> merged_flags({"embedding": True, "layers": [{"w": True, "b": True}, False]})
      {'embedding': True, 'layers': [True, False]}
    """
    if isinstance(flags, dict):
        found: Any = {name: merged_flags(part) for name, part in flags.items()}
        parts = list(found.values())
    elif isinstance(flags, list | tuple) and not hasattr(flags, "_fields"):
        found = type(flags)(map(merged_flags, flags))
        parts = list(found)
    else:
        return flags
    for flag in (True, False):
        if parts and all(part is flag for part in parts):
            return flag
    return found
