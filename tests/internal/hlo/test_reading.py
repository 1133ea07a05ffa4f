"""Tests the numbers of a whole module: loops, branches, and covered collectives."""

import jax
import pytest
from jax.sharding import AxisType

from pipejax.overlap import inspect

from ...overlap import DOT, FLOPS, GROUPS, HIDDEN, dots, program
from .test_schedule import DONE, START, WRAPPED, loop, only, read


def test_variadic_collective_has_the_bytes_of_all_operands():
    c = only(
        f"%s = (f32[100], f32[8,8]) all-reduce(%x, %p), {GROUPS}",
        "ROOT %r = f32[100] get-tuple-element(%s), index=0",
    )
    assert (c.bytes, c.wire_bytes, c.dtypes) == (656, 2 * 7 / 8 * 656, ("f32",))


def test_collective_in_a_loop_is_counted_for_every_iteration():
    entry, others = loop(
        f"{START}\n{dots('a')}\n%r = f32[100] all-reduce-done(%s)\n{dots('c')}\n"
        "ROOT %t = (s32[], f32[8,8], f32[100]) tuple(%i, %a, %r)"
    )
    report = read(dots("d", "e"), *entry, others=others)
    (c,) = report.collectives
    assert report.flops == (2 + 5 * 2) * FLOPS
    assert (c.times, c.matmuls, c.flops) == (5, 5, 5 * FLOPS)
    assert c.bytes == 400  # the bytes of one execution
    assert report.covered == report.share == pytest.approx(5 / 12)


# The large all-reduce ends before the matmul begins, and the small one after.
LIGHT = """HloModule step, is_scheduled=true, replica_count=4
ENTRY %main (p: f32[8,8], x: f32[1000], y: f32[9]) -> f32[1000] {
  %p = f32[8,8] parameter(0)
  %x = f32[1000] parameter(1)
  %y = f32[9] parameter(2)
  %large = f32[1000] all-reduce-start(%x), replica_groups={{0,1},{2,3}}
  %done = f32[1000] all-reduce-done(%large)
  %small = f32[9] all-reduce-start(%y), replica_groups={GROUPS}
  %matmul = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}
  %end = f32[9] all-reduce-done(%small)
  ROOT %all = f32[1000] copy(%done)
}"""


def test_light_collective_covers_nothing():
    mesh = jax.make_mesh((2, 2), ("host", "device"), axis_types=2 * (AxisType.Auto,))
    report = inspect(LIGHT.replace("{GROUPS}", "{{0,1},{2,3}}"), mesh=mesh)
    assert [each.share for each in report.collectives] == [0, 1]
    assert (report.covered, report.covered_by) == (0, {("device",): 0})
    # Over other axes, the small one is all there is.
    report = inspect(LIGHT.replace("{GROUPS}", "{{0,2},{1,3}}"), mesh=mesh)
    assert report.covered == 0
    assert report.covered_by == {("device",): 0, ("host",): 1}
    # With a hundredth of the bytes, it counts.
    report = inspect(LIGHT.replace("f32[9]", "f32[11]").replace("{GROUPS}", "{}"))
    assert report.covered == 1


def test_many_equal_collectives_are_not_light():
    """Each of 126 sends less than a hundredth of the bytes."""
    count = range(126)
    begun = [f"%s{i} = f32[8,8] all-reduce-start(%p), {GROUPS}" for i in count]
    ended = [f"%e{i} = f32[8,8] all-reduce-done(%s{i})" for i in count]
    last = "ROOT %r = f32[100] copy(%x)"
    assert read(*begun, dots("d"), *ended, last).covered == 1


BRANCHES = f"""
%many (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  %a = f32[8,8] {DOT}
  ROOT %d = f32[8,8] {DOT}
}}

%few (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  %s = f32[8,8] all-reduce-start(%p), {GROUPS}
  %a = f32[8,8] {DOT}
  ROOT %r = f32[8,8] all-reduce-done(%s)
}}
"""


def test_collective_in_a_branch_is_compared_with_the_largest_branch():
    report = read(
        "%c = f32[8,8] conditional(%x, %p, %p), branch_computations={%many, %few}",
        "ROOT %r = f32[100] copy(%x)",
        others=BRANCHES,
    )
    (c,) = report.collectives
    assert (c.matmuls, c.share) == (1, 0.5)
    assert report.covered == 0  # the share in the largest branch
    report = read(
        "%c = f32[8,8] call(%p), to_apply=%few",
        "ROOT %r = f32[100] copy(%x)",
        others=BRANCHES,
    )
    assert report.collectives[0].share == report.covered == 1


def test_largest_branch_is_drawn():
    """The other branch's collective is counted, and has no place in the picture."""
    report = read(
        "%c = f32[8,8] conditional(%x, %p, %p), branch_computations={%many, %few}",
        "ROOT %r = f32[100] copy(%x)",
        others=BRANCHES,
    )
    assert [c.name for c in report.collectives] == ["s"]
    found = [(x.name, x.start, x.end) for x in report.schedule]
    assert found == [("a", 0, 1), ("d", 1, 2), ("r", 2, 3)]


def test_covered_flops_are_a_union():
    second = START.replace("%s", "%s2")
    report = read(
        START,
        dots("a"),
        second,
        dots("b"),
        DONE.removeprefix("ROOT "),
        dots("c"),
        "ROOT %r2 = f32[100] all-reduce-done(%s2)",
        dots("d"),
    )
    assert [c.share for c in report.collectives] == [0.5, 0.5]
    assert report.covered == 0.75
    overlapping = [(x.start, x.end) for x in report.schedule if x.kind == "all-reduce"]
    assert overlapping == [(0, 2), (1, 3)]


def test_collective_called_by_an_unknown_instruction_is_refused():
    with pytest.raises(ValueError, match="a collective in wrapped, which no loop"):
        read("ROOT %r = f32[100] sort(%x), to_apply=%wrapped", others=WRAPPED)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 200), ("u8", 100), ("s4", 50)])
def test_payload_of_narrow_dtypes_has_their_bytes(dtype, size):
    convert = f"%n = {dtype}[100] convert(%x)"
    text = f"{convert}\nROOT %r = {dtype}[100] all-reduce(%n), {GROUPS}"
    (c,) = inspect(program(text)).collectives
    assert (c.bytes, c.dtypes) == (size, (dtype,))


def test_compute_and_collectives_are_drawn_in_their_order():
    report = inspect(program(HIDDEN))
    found = [(x.name, x.kind, x.start, x.end) for x in report.schedule]
    assert found == [
        ("a", "matmul", 0, 1),
        ("b", "matmul", 1, 2),
        ("e", "other", 2, 3),
        ("u", "other", 3, 4),
        ("r", "other", 4, 5),
        ("s", "all-reduce", 0, 3),
        ("v", "all-gather", 4, 4),
    ]
