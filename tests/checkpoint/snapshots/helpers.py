"""Writes files of snapshots."""

import numpy as np

from pipejax.checkpoint._snapshots import _file
from pipejax.checkpoint._snapshots._blocks import Block

CONTENTS = {
    Block("w", (0, 0), (2, 3), "float32"): np.arange(6, dtype=np.float32),
    Block("n", (), (), "int32"): np.int32(7),
    Block("b", (4,), (5,), "bool"): np.ones(5, bool),
}


def header(step=3, rank=0, *, attempt=1, processes=1, rest=-1, extras=None):
    """Returns a header without blocks."""
    meta = {"digest": "d"}
    label = _file.Label(attempt, step, rank, processes, rest)
    return _file.Header(label, meta, extras or {}, [], {}, {})


def write(path, header, contents=CONTENTS):
    """Writes a whole file, and returns its header."""
    offsets, size = _file.offsets(contents)
    data = _file.reserve(path, size)
    for block, at in offsets.items():
        _file.put(data, at, np.asarray(contents[block]))
    sums = {x: _file.checksum(data, at, x.size) for x, at in offsets.items()}
    full = header._replace(offsets=offsets, checksums=sums)
    _file.commit(path, full)
    return full
