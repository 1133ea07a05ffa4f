"""
Tests every number of reports on other people's programs, compiled for every target.

The numbers of a report are compared with what is known without it: FLOPs by hand,
groups as lines of the mesh, counts and bytes read from the text in another way, and
XLA's own cost analysis where there is one.
"""

import collections
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import pipejax as pj
from pipejax.overlap import collective_groups, inspect

from . import independent
from .corpus import PROGRAMS
from .corpus.language_model import BLOCKS, LENGTH, VOCABULARY
from .corpus.shapes import BOTH, LAYERS, ROWS, WIDTH
from .test_topology import GPU, TPU

SLICES = "tpu:2xv5e:2x2"
TARGETS = {
    "cpu": (),
    "h100:1x4x8": GPU,
    "tpu:v5e:2x4": TPU,
    "tpu:v5p:2x2x2": TPU,
    "tpu:v6e:2x4": TPU,
    "tpu:tpu7x:2x2x1": TPU,
    SLICES: TPU,
}
# Collectives of the other targets are always asynchronous, or never.
WITH_OPTIONS = [x for x in TARGETS if x not in ("cpu", "tpu:tpu7x:2x2x1")]
# On TPUs, the result of an all-reduce may be bfloat16 while float32 is sent: XLA does
# this to the maximum in the loop. Bytes are checked by the result.
NARROWED = [target for target in TARGETS if "tpu" in target]
# Only GPUs have `pbroadcast`, `psend` and `precv`. CPUs have no ragged all-to-all.
ONLY = {"broadcast": "h100", "send and receive": "h100", "ragged": "h100 tpu"}
QUICK = {
    ("cpu", "fsdp scanned"),
    ("cpu", "zero"),
    ("cpu", "tensor parallel, explicit"),
    ("cpu", "expert parallel"),
    ("cpu", "loops and branches"),
    ("cpu", "resharded"),
    ("cpu", "pmap"),
    ("cpu", "language model"),
    ("h100:1x4x8", "fsdp"),
    ("h100:1x4x8", "fsdp across hosts, transposed"),
    ("h100:1x4x8", "every collective"),
    ("h100:1x4x8", "broadcast"),
    ("h100:1x4x8", "ragged"),
    ("h100:1x4x8", "send and receive"),
    ("tpu:v5e:2x4", "fsdp scanned"),
    ("tpu:v5p:2x2x2", "fsdp"),
    ("tpu:v5p:2x2x2", "ring"),
    ("tpu:2xv5e:2x2", "fsdp"),
}


def cases(*targets):
    for target, program in itertools.product(targets, PROGRAMS):
        if any(kind in target for kind in ONLY.get(program, target).split()):
            quick = (target, program) in QUICK
            marks = [TARGETS[target]] if TARGETS[target] else []
            marks += [] if quick else [pytest.mark.full]
            yield pytest.param(target, program, marks=marks, id=f"{target}, {program}")


def mesh_of(target):
    """Returns a mesh of hosts and their devices, or of two halves of one process."""
    devices = jax.devices() if target == "cpu" else pj.overlap.topology(target)
    hosts = len({device.process_index for device in devices})
    grid = np.array(devices).reshape(hosts if hosts > 1 else 2, -1)
    return Mesh(grid, BOTH, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(("target", "program"), list(cases(*TARGETS)))
def test_report_of_every_program_equals_independent_numbers(target, program):
    check(target, program, mesh_of(target), {})


@pytest.mark.full
@pytest.mark.parametrize(("target", "program"), list(cases(*WITH_OPTIONS)))
def test_report_with_overlap_options_equals_independent_numbers(target, program):
    """The options that let collectives overlap make more of them asynchronous."""
    mesh = mesh_of(target)
    options = pj.compiler_options(mesh)
    assert options
    check(target, program, mesh, options)


def check(target, program, mesh, options):
    function, *args = PROGRAMS[program](mesh)
    compiled = function.lower(*args).compile(options)
    text, report = compiled.as_text(), inspect(compiled)
    listed = collective_groups(compiled, mesh)
    begun = [one for one in listed if independent.begins(one.line)]
    check_counts(report, begun, text)
    check_groups(report, begun, listed, mesh)
    if target not in NARROWED or program != "loops and branches":
        check_bytes(report, begun)
    check_flops(report, program, mesh, compiled)
    check_times(report, program, mesh, target)
    # XLA takes the program apart between slices.
    if program in EXACTLY and target != SLICES:
        check_what_is_written(report, begun, program, mesh)


def check_counts(report, begun, text):
    """The count of each kind is the number of lines with such an opcode."""
    lines = filter(independent.begins, text.splitlines())
    kinds = map(independent.kind_of, lines)
    expected = collections.Counter(kind for kind in kinds if kind)
    assert collections.Counter(c.kind for c in report.collectives) == expected
    assert collections.Counter(one.kind for one in begun) == expected


def check_groups(report, begun, listed, mesh):
    """Every group is a line of the mesh, and those along `host` cross hosts.

    A permute may have any pairs, for example those that change the order of devices.
    """
    known = independent.lines_of(mesh)
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    for one in listed:
        groups = frozenset(one.groups)
        if one.kind == "collective-permute" and groups not in known:
            pairs = independent.pairs_of(one.line, mesh)
            assert groups == independent.reached(pairs, mesh)
            crosses = any(a.process_index != b.process_index for a, b in pairs)
        else:
            crosses = several and any("host" in axis for axis in known[groups])
        assert one.crosses_processes == crosses, one
    sizes = sorted(max(map(len, one.groups)) for one in begun)
    assert sorted(c.group_size for c in report.collectives) == sizes


def check_bytes(report, begun):
    """The bytes follow from the result of each collective and its group's size."""
    sizes = [max(map(len, one.groups)) for one in begun]
    expected = [
        (one.kind, independent.handed_over(one.line, size))
        for one, size in zip(begun, sizes, strict=True)
    ]
    found = [(c.kind, c.bytes) for c in report.collectives]
    assert sorted(found) == sorted(expected)


def check_flops(report, program, mesh, compiled):
    """FLOPs are known by hand. XLA's own count adds other operations to matmuls."""
    least, most = FLOPS[program](*mesh.axis_sizes)
    assert least <= report.flops <= most
    loops = ["a loop of unknown length, counted once"] * (program in UNKNOWN)
    assert [what.split(": ")[1] for what in report.uncounted] == loops
    cost = (compiled.cost_analysis() or {}).get("flops")
    if cost and report.flops and all(c.times == 1 for c in report.collectives):
        assert report.flops <= cost <= 1.5 * report.flops


UNKNOWN = ("loops and branches",)


def layers(count):
    """Returns the FLOPs of `count` matmuls of a device's rows with a layer."""
    flops = count * 2 * ROWS * WIDTH**2
    return lambda hosts, devices: (flops, flops)


def megatron(hosts, devices):
    # There are two layers of two matmuls. The first one needs no gradient of its input.
    flops = (2 * 2 * 3 - 1) * 2 * (ROWS * devices) * WIDTH * (4 * WIDTH / devices)
    return flops, flops


def experts(hosts, devices):
    """There are five large matmuls, and up to four small ones may count or not."""
    tokens = 2 * ROWS
    large = 5 * 2 * (tokens * devices) * WIDTH * 2 * WIDTH
    return large, large + 4 * 2 * tokens * WIDTH * devices


def decoder(hosts, devices):
    """The backward pass costs twice the forward pass of blocks and logits."""
    tokens = 2 * LENGTH
    block = 2 * tokens * WIDTH * (4 * WIDTH + 2 * LENGTH + 2 * 4 * WIDTH)
    flops = 3 * (BLOCKS * block + 2 * tokens * WIDTH * VOCABULARY)
    return flops, flops


def exact(flops):
    return lambda hosts, devices: (flops(hosts, devices),) * 2


FLOPS = {
    # Each layer has a forward matmul and the gradients of weights and input. The first
    # layer needs no gradient of its input.
    "fsdp": layers(3 * LAYERS - 1),
    "fsdp remat": layers(4 * LAYERS - 1),
    "fsdp scanned": layers(3 * LAYERS),
    "fsdp scanned remat": layers(4 * LAYERS),
    "fsdp across hosts": layers(3 * LAYERS - 1),
    "fsdp across hosts, transposed": layers(3 * LAYERS - 1),
    "zero": layers(3 * LAYERS - 1),
    "tensor parallel": megatron,
    "tensor parallel, explicit": megatron,
    "expert parallel": experts,
    "expert parallel, manual": experts,
    "every collective": exact(lambda hosts, devices: 2 * (4 * devices) ** 2 * 16),
    "resharded": exact(lambda hosts, devices: 0),
    "broadcast": exact(lambda hosts, devices: 0),
    "ragged": exact(lambda hosts, devices: 0),
    "send and receive": exact(lambda hosts, devices: 0),
    # These are 5, 2 x 3, one of the loop of unknown length, and the larger branch.
    "loops and branches": exact(lambda hosts, devices: (5 + 6 + 1 + 2) * 2 * 16**3),
    "ring": exact(lambda hosts, devices: devices * 2 * 16 * WIDTH**2),
    "pmap": layers(2),
    "language model": decoder,
}


def check_times(report, program, mesh, target):
    """Each collective runs as often as the product of its loops' lengths."""
    times = [c.times for c in report.collectives]
    if "scanned" in program:
        # Exchanges between slices also run a layer late, and the last one after the
        # loop.
        late = {LAYERS - 1} if target == SLICES else set()
        assert set(times) == {1, LAYERS} | late
    elif program == "ring":
        assert times == [mesh.shape["device"]]
    elif program == "loops and branches":
        # Between slices the last collective is three: in a slice, across slices, in a
        # slice.
        assert times == [5, 6, 1, 1] + [1, 1] * (target == SLICES)
    else:
        assert set(times) == {1}


# Kind, axes, and number of elements that a device contributes, by the devices of a
# host. XLA may combine reductions along the same axes, and replace a reduce-scatter.
EXACTLY = {
    "every collective": [
        ("all-reduce", ("device",), lambda n: 4 * n * 16),
        ("all-reduce", BOTH, lambda n: 4 * n * 16),
        ("all-gather", ("host",), lambda n: (4 * n) ** 2),
        ("reduce-scatter", ("device",), lambda n: 4 * n * 16),
        ("all-to-all", ("device",), lambda n: 4 * n * 16),
        ("collective-permute", ("host",), lambda n: 4 * n * 16),
        ("all-reduce", ("host",), lambda n: 4 * n * 16),
    ],
    "broadcast": [("collective-broadcast", ("device",), lambda n: 16)],
    "ragged": [("ragged-all-to-all", ("device",), lambda n: 8 * n * 2 * WIDTH)],
    "send and receive": [
        ("send", ("device",), lambda n: ROWS * WIDTH),
        ("recv", ("device",), lambda n: ROWS * WIDTH),
    ],
    "loops and branches": [
        ("all-reduce", ("device",), lambda n: 16 * 16),
        ("all-reduce", ("host",), lambda n: 16 * 16),
        ("all-reduce", ("host",), lambda n: 16 * 16),
        ("all-reduce", BOTH, lambda n: 16 * 16),
    ],
    "ring": [("collective-permute", ("device",), lambda n: 16 * WIDTH)],
}


def check_what_is_written(report, begun, program, mesh):
    """A program that names its collectives has exactly these."""
    known = independent.lines_of(mesh)
    reductions = {"all-reduce": "reduction", "reduce-scatter": "reduction"}
    along, written, found = set(), collections.Counter(), collections.Counter()
    for kind, axes, size in EXACTLY[program]:
        kind = reductions.get(kind, kind)
        along.add((kind, axes))
        written[kind] += size(mesh.shape["device"])
    for c in report.collectives:
        # A TPU rounds to bfloat16 before it sends operands of a multiplication.
        (dtype,) = c.dtypes
        found[reductions.get(c.kind, c.kind)] += c.bytes / independent.BYTES[dtype]
    assert found == written
    kinds = [reductions.get(one.kind, one.kind) for one in begun]
    axes = [known[frozenset(one.groups)] for one in begun]
    assert set(zip(kinds, axes, strict=True)) == along
