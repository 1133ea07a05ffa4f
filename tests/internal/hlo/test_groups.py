"""
Tests the groups of devices in every form, by hand and against XLA's execution.

XLA runs a program of one collective on eight CPU devices. Each device contributes a bit
of its own, and the bits that a device receives are those of its group.
"""

import re

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _hlo, _jax, xla_client

from pipejax._internal.hlo._groups import groups_of
from pipejax._internal.hlo._parse import parse

DEVICES = 8
TEXT = """HloModule one, replica_count={replicas}, num_partitions={partitions}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[1]) -> f32[{size}] {{
  %x = f32[1]{{0}} parameter(0)
  %many = f32[{many}]{{0}} broadcast(%x), dimensions={{0}}
  ROOT %out = f32[{size}]{{0}} {line}
}}
"""
REDUCE = "all-reduce(%x), {}, to_apply=%add"
GATHER = "all-gather(%x), {}, dimensions={{0}}"
SCATTER = "reduce-scatter(%many), {}, dimensions={{0}}, to_apply=%add"
EXCHANGE = "all-to-all(%many), {}, dimensions={{0}}"
PERMUTE = "collective-permute(%x), {}"


def text_of(line, partitions=DEVICES, size=1, many=1):
    replicas = DEVICES // partitions
    return TEXT.format(**locals())


def found(text):
    module = parse(text)
    return {tuple(sorted(g)) for g in groups_of(module.entry.root, module)}


def as_xla_runs(text, partitions):
    """Returns the groups by execution: the devices whose bits each device receives."""
    module = _hlo.hlo_module_from_text(text)
    program = _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
    if ids := re.search(r"device_ids=\((.*?)\) \{", text):
        # The conversion loses the ids, and the converted module has a place for them.
        with mlir.make_ir_context():
            whole = str(ir.Module.parse(program))
        program = whole.replace("]>\n", f"], device_ids={listed_ids(ids[1])}>\n", 1)
    order = np.arange(DEVICES).reshape(-1, partitions)
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    for where in (options, build):
        where.num_replicas, where.num_partitions = order.shape
    build.use_spmd_partitioning = True
    build.device_assignment = xla_client.DeviceAssignment.create(order)
    devices = tuple(jax.devices())
    executable = devices[0].client.compile_and_load(
        program, xla_client.DeviceList(devices), options
    )
    mesh = jax.make_mesh((DEVICES,), ("i",), axis_types=(AxisType.Auto,))
    bits = jax.device_put(
        np.float32(2) ** np.arange(DEVICES), NamedSharding(mesh, P("i"))
    )
    (out,) = executable.execute_sharded([bits]).disassemble_into_single_device_arrays()
    sums = [int(np.asarray(x).sum()) for x in out]
    return {tuple(i for i in range(DEVICES) if bit >> i & 1) for bit in sums}


def listed_ids(text):
    """Returns a list of ids for `[2,4]T(1,0)`, or for a list."""
    if not text.startswith("["):
        return f"[{text}]"
    dims, order = ([int(n) for n in x.split(",")] for x in text[1:-1].split("]T("))
    return str(np.arange(DEVICES).reshape(dims).transpose(order).ravel().tolist())


def pairs(*groups):
    return {tuple(group) for group in groups}


ALL = pairs(range(8))
ROWS, COLUMNS = pairs([0, 1, 2, 3], [4, 5, 6, 7]), pairs([0, 4], [1, 5], [2, 6], [3, 7])
FORMS = {
    "{{0,1,2,3},{4,5,6,7}}": ROWS,
    "{{0,4},{1,5},{2,6},{3,7}}": COLUMNS,
    "[2,4]<=[8]": ROWS,
    "[4,2]<=[2,4]T(1,0)": COLUMNS,
    "[2,4]<=[2,2,2]T(1,0,2)": pairs([0, 1, 4, 5], [2, 3, 6, 7]),
    "mesh['data'=8] {'data'}": ALL,
    "mesh['x'=2,'y'=4] {'y'}": ROWS,
    "mesh['x'=2,'y'=4] {'x'}": COLUMNS,
    "mesh['x'=2,'y'=4] {'y','x'}": ALL,
    "mesh['x'=2,'y'=1,'z'=4] {'y','z'}": ROWS,
    "mesh['x'=8] {'x':(1)2}": COLUMNS,
    "mesh['x'=8] {'x':(2)4}": ROWS,
    "mesh['x'=8] {'x':(2)2}": pairs([0, 2], [1, 3], [4, 6], [5, 7]),
    "mesh['x'=8] {'x':(1)2,'x':(4)2}": pairs([0, 1, 4, 5], [2, 3, 6, 7]),
    "mesh['x'=8] {'x':(4)2,'x':(1)2}": pairs([0, 1, 4, 5], [2, 3, 6, 7]),
    "mesh['x'=2,'y'=4] {'x','y':(2)2}": pairs([0, 1, 4, 5], [2, 3, 6, 7]),
    "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}": ROWS,
    "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}": COLUMNS,
    "mesh['a'=4,'b'=2], device_ids=(3,1,2,0,7,6,5,4) {'b'}": pairs(
        [1, 3], [0, 2], [6, 7], [4, 5]
    ),
    "mesh['a, {b'=2,'c]'=4] {'c]'}": ROWS,
}
GLOBAL = "channel_id=1, use_global_device_ids=true, replica_groups="


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_groups_is_read_as_by_xla(form):
    text = text_of(REDUCE.format(GLOBAL + form))
    assert found(text) == as_xla_runs(text, DEVICES) == FORMS[form]


@pytest.mark.parametrize("partitions", [8, 4, 2, 1])
@pytest.mark.parametrize(
    ("line", "attributes"),
    [
        (REDUCE, "replica_groups={}"),
        (REDUCE, "replica_groups={REPLICAS}"),
        (REDUCE, "channel_id=1, replica_groups={}"),
        (REDUCE, "channel_id=1, replica_groups={REPLICAS}"),
        (REDUCE, f"{GLOBAL}{{{{0,3,5}},{{1,2,4,6,7}}}}"),
        (PERMUTE, "source_target_pairs={REPLICA_RING}"),
        (PERMUTE, "channel_id=1, source_target_pairs={PARTITION_RING}"),
    ],
)
def test_numbers_mean_replicas_partitions_or_devices(line, attributes, partitions):
    """The numbers are replicas, partitions or devices, by attributes and opcode."""
    replicas = DEVICES // partitions

    def halves(n):
        return [range(n // 2), range(n // 2, n)] if n > 1 else [range(n)]

    def listed(groups):
        return ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)

    def ring(n):
        return listed((i, (i + 1) % n) for i in range(n))

    for name, written in {
        "REPLICAS": listed(halves(replicas)),
        "REPLICA_RING": ring(replicas),
        "PARTITION_RING": ring(partitions),
    }.items():
        attributes = attributes.replace(name, written)
    text = text_of(line.format(attributes), partitions)
    ran = as_xla_runs(text, partitions)
    # Each device receives from one device. The group consists of all connected devices.
    if line == PERMUTE:
        assert all(any(set(one) <= set(g) for g in found(text)) for one in ran)
        size = replicas if "channel_id" not in attributes else partitions
        assert {len(group) for group in found(text)} == {size}
    else:
        assert found(text) == ran


@pytest.mark.parametrize(
    ("line", "size", "many"), [(GATHER, 4, 1), (SCATTER, 1, 4), (EXCHANGE, 4, 4)]
)
def test_groups_of_other_collectives_are_read_as_by_xla(line, size, many):
    form = "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}"
    text = text_of(line.format(GLOBAL + form), size=size, many=many)
    if line == EXCHANGE:
        text = text.replace("use_global_device_ids=true, ", "")
    assert found(text) == as_xla_runs(text, DEVICES) == ROWS


@st.composite
def meshes(draw):
    """Draws a mesh of eight devices in any order, and some of its axes or parts."""
    shape = draw(st.permutations(draw(st.sampled_from([(8,), (2, 4), (2, 2, 2)]))))
    names = [f"'{name}'" for name in "abc"[: len(shape)]]
    text = ",".join(f"{n}={size}" for n, size in zip(names, shape, strict=True))
    dims = draw(st.permutations([(2, 4), (2, 2, 2)]))[0]
    order = ",".join(map(str, draw(st.permutations(range(len(dims))))))
    turned = f"[{','.join(map(str, dims))}]T({order})"
    listed = ",".join(map(str, draw(st.permutations(range(8)))))
    ids = draw(st.sampled_from(["", turned, listed]))
    iota = {"[2,4]T(0,1)", "[2,2,2]T(0,1,2)", "0,1,2,3,4,5,6,7"}
    ids = f", device_ids=({ids})" if ids and ids not in iota else ""
    along = []
    for name, size in zip(names, shape, strict=True):
        parts = [[], [name]]
        if size == 4:
            parts += [[f"{name}:(1)2"], [f"{name}:(2)2"]]
        if size == 8:
            parts += [[f"{name}:({n})2"] for n in (1, 2, 4)]
            parts += [[f"{name}:({n})4"] for n in (1, 2)]
            parts += [[f"{name}:(1)2", f"{name}:(4)2"]]
        along += draw(st.sampled_from(parts))
    return f"mesh[{text}]{ids} {{{','.join(draw(st.permutations(along)))}}}"


@hypothesis.given(meshes())
def test_groups_of_any_mesh_are_read_as_by_xla(form):
    # JAX 0.10's parser refuses groups of one device.
    hypothesis.assume("{}" not in form)
    text = text_of(REDUCE.format(GLOBAL + form))
    assert found(text) == as_xla_runs(text, DEVICES)


def test_groups_without_axes_hold_one_device_each():
    text = text_of(REDUCE.format(GLOBAL + "mesh['x'=2,'y'=4] {}"))
    assert found(text) == {(i,) for i in range(8)}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{0,1},{1,2},{2,0}}", {(0, 1, 2)}),
        ("{{0,1},{2,3},{1,2},{5,6}}", {(0, 1, 2, 3), (5, 6)}),
        ("{{3,3},{4,4}}", {(3,), (4,)}),
        ("{}", {()}),
    ],
)
def test_pairs_are_connected_to_groups(written, expected):
    line = PERMUTE.format(f"channel_id=1, source_target_pairs={written}")
    assert found(text_of(line)) == expected


@pytest.mark.parametrize(
    "form",
    [
        "<new>",
        "",
        "{{0,1}",
        "{{},{}}",
        "{{0,1},{1,2}}",
        "{{0,1},{7,8}}",
        "[2,4]<=[9]",
        "[2,2]<=[8]",
        "[2,4]<=[2,4]T(0,2)",
        "mesh['x'=8] {'y'}",
        "mesh['x'=9] {'x'}",
        "mesh['x'=8] {'x':(3)2}",
        "mesh['x'=8], device_ids=([2,5]T(1,0)) {'x'}",
        "mesh['x'=8], device_ids=(0,1) {'x'}",
        "mesh[x=8] {x}",
        "mesh[] {}",
        "@mesh<x=8> {x}",
    ],
)
def test_unknown_forms_of_groups_are_refused(form):
    text = text_of(REDUCE.format(GLOBAL + form))
    line = next(line for line in text.splitlines() if "all-reduce" in line).strip()
    with pytest.raises(
        ValueError, match=r"report the following line, because .* an unknown form"
    ) as caught:
        found(text)
    assert str(caught.value).endswith(line)


@pytest.mark.parametrize(
    ("mode", "numbered", "expected"),
    [
        ("flattened_id", "{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("cross_replica", "{{0,1}}", COLUMNS),
        ("cross_partition", "{{0,1,2,3}}", ROWS),
        ("cross_replica_and_partition", "{{0},{1}}", ROWS),
    ],
)
def test_explicit_mode_of_groups_is_followed(mode, numbered, expected):
    """The text has 2 replicas with 4 partitions each."""
    line = REDUCE.format(f"channel_id=1, replica_groups={numbered}, mode={mode}")
    assert found(text_of(line, partitions=4)) == expected


def test_unknown_mode_of_groups_is_refused():
    text = text_of(REDUCE.format("mode=by_colour, replica_groups={}"))
    with pytest.raises(ValueError, match=r"an unknown form.*\n.*mode=by_colour"):
        found(text)


def test_collective_without_groups_is_refused():
    text = text_of(REDUCE.format("channel_id=1"))
    with pytest.raises(ValueError, match="its groups have an unknown form"):
        found(text)
