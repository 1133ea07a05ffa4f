"""Values that JSON gives back unchanged, and the refusal of all others.

JSON turns tuples into lists, keys into strings and NumPy's float64 into Python's float,
and it cannot write NumPy's integers at all. A run that goes on from such values is not
the run that was saved, so everything that would change is refused before it is written.
"""

import json
import reprlib
from collections.abc import Iterator
from typing import Any

_SCALARS = (str, int, float, bool, type(None))


def json_copy(name: str, value: Any) -> Any:
    """Copies `value`, a dict that JSON gives back unchanged.

    NaN and infinities are allowed: Python's `json` writes and reads them.

    Args:
      name: of the argument, for the message.
      value: dicts with string keys, lists, strings, numbers, bools and None.

    Raises:
      ValueError: naming the first entry that is anything else.

    >>> json_copy("extras", {"next_index": 640, "shards": [1, 5]})
    {'next_index': 640, 'shards': [1, 5]}
    """
    try:
        problem = next(_foreign(name, value), None)
        if type(value) is not dict:
            problem = f"`{name}` itself, {_described(value)}"
        copy = json.loads(json.dumps(value)) if problem is None else None
    except (RecursionError, ValueError) as error:  # nested for ever, 4301 digits
        problem = f"a value that it cannot write: {error}"
    if problem is not None:
        raise ValueError(
            f"`{name}` must be a dict of what JSON gives back unchanged: dicts with"
            " string keys, lists, and Python's own strings, numbers, bools and None;"
            f" got {problem}. Convert it first, for example by int(value),"
            " value.tolist(), list(value) or str(value)."
        )
    return copy


def _foreign(where: str, value: Any) -> Iterator[str]:
    """Yields a description of each entry that JSON would change or refuse."""
    if type(value) is dict:
        for key, entry in value.items():
            if type(key) is not str:
                yield f"a key of `{where}`, {_described(key)}"
            yield from _foreign(f"{where}[{key!r}]", entry)
    elif type(value) is list:
        for index, entry in enumerate(value):
            yield from _foreign(f"{where}[{index}]", entry)
    elif type(value) not in _SCALARS:
        yield f"`{where}`, {_described(value)}"


def _described(value: Any) -> str:
    kind = type(value)
    return f"{reprlib.repr(value)} of type {kind.__module__}.{kind.__qualname__}"
