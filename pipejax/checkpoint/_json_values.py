"""Copies values that JSON returns unchanged, and raises an error for all others.

JSON turns tuples into lists, keys into strings, and NumPy's float64 into Python's
float. A run that continues from changed values is not the run that was saved.
"""

import json
import reprlib
from collections.abc import Iterator
from typing import Any

_SCALARS = (str, int, float, bool, type(None))


def json_copy(name: str, value: Any) -> Any:
    """Copies a dict that JSON returns unchanged.

    NaN and infinities are allowed, because Python's `json` writes and reads them.
    """
    try:
        problem = next(_foreign(name, value), None)
        if type(value) is not dict:
            problem = f"`{name}` itself, {_described(value)}"
        if problem is None:
            return json.loads(json.dumps(value))
    except (RecursionError, ValueError) as error:
        # The value contains itself, or an integer has more than 4300 digits.
        problem = f"a value that JSON cannot write: {error}"
    raise ValueError(
        f"`{name}` must be a dict of values that JSON returns unchanged: dicts with"
        " string keys, lists, and Python's own strings, numbers, bools and None; got"
        f" {problem}. Convert it first, for example with int(value), value.tolist(),"
        " list(value) or str(value)."
    )


def _foreign(where: str, value: Any) -> Iterator[str]:
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
