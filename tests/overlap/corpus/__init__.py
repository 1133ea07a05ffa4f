"""
Provides programs as users of JAX write them. None of them uses pipejax.

Each program takes a mesh of devices that need not be present. The axis `host` of the
mesh crosses hosts, and the axis `device` does not. The program returns a jitted
function and the shapes of its arguments.
"""

import functools

from . import language_model, layouts, manual

PROGRAMS = {
    "fsdp": layouts.fsdp,
    "fsdp remat": functools.partial(layouts.fsdp, loss_fn=layouts.mlp_remat),
    "fsdp scanned": layouts.fsdp_scanned,
    "fsdp scanned remat": functools.partial(layouts.fsdp_scanned, remat=True),
    "fsdp across hosts": functools.partial(layouts.fsdp, weights=("host",)),
    "fsdp across hosts, transposed": functools.partial(
        layouts.fsdp, weights=("host",), rows=("device", "host")
    ),
    "zero": functools.partial(layouts.fsdp, weights=("device", "host")),
    "resharded": layouts.resharded,
    "tensor parallel": layouts.tensor_parallel,
    "tensor parallel, explicit": layouts.tensor_parallel_explicit,
    "expert parallel": layouts.expert_parallel,
    "expert parallel, manual": manual.expert_parallel,
    "every collective": manual.every_collective,
    "broadcast": manual.broadcast,
    "ragged": manual.ragged,
    "send and receive": manual.send_and_receive,
    "loops and branches": manual.loops_and_branches,
    "ring": manual.ring,
    "pmap": manual.mapped,
    "language model": language_model.step,
}
