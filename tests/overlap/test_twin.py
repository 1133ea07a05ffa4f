"""Tests the comparison of what two programs send inside groups of devices."""

import pytest

import pipejax as pj
from pipejax.overlap import Inside, difference_inside, inspect

MESH = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
INSIDE, BETWEEN = "{{0,1},{2,3}}", "{{0,2},{1,3}}"


def report(*collectives):
    """Returns the report on a program of `(opcode, elements, groups)`."""
    lines = [
        f"  %x{i} = f32[{n}] parameter({i})\n  %c{i} = f32[{n}] {op}(%x{i}),"
        f" replica_groups={groups}"
        for i, (op, n, groups) in enumerate(collectives)
    ]
    body = "\n".join([*lines, "  ROOT %end = f32[] constant(0)"])
    header = "HloModule step, is_scheduled=true, replica_count=4\nENTRY %main {\n"
    return inspect(f"{header}{body}\n}}", mesh=MESH)


def test_twin_comparison_omits_the_exchange_and_sums_the_rest():
    first = report(("all-reduce", 10, INSIDE), ("all-reduce", 99, BETWEEN))
    second = report(
        ("all-reduce", 10, INSIDE),
        ("all-reduce", 30, INSIDE),
        ("all-gather", 5, INSIDE),
    )
    gather, reduce = difference_inside(first, second, "host")
    assert gather == Inside("all-gather", ("fsdp",), (0, 1), (0, 20))
    assert reduce == Inside("all-reduce", ("fsdp",), (1, 2), (40, 160))
    assert str(reduce) == "all-reduce over fsdp: 1 and 2 times, 40 B and 160 B"


@pytest.mark.parametrize(
    ("sent", "alike"),
    [
        ((0, 1024), True),
        ((0, 1025), False),
        ((1e6, 1.011e6), True),
        ((1e6, 1.02e6), False),
    ],
)
def test_bytes_inside_count_as_alike_within_a_small_difference(sent, alike):
    assert Inside("all-reduce", ("fsdp",), (1, 1), sent).alike is alike
