"""Tests which instructions are collectives, and how much a device contributes."""

import pytest

from pipejax._internal.hlo._collectives import (
    COLLECTIVES,
    group_size,
    handed_over,
    is_collective,
    kind_of,
)
from pipejax._internal.hlo._parse import parse

from ...overlap import GROUPS, program


def read(line):
    text = f"%n = s32[] constant(0)\n{line}\nROOT %r = f32[100] copy(%x)"
    module = parse(program(text))
    return module.entry["a"], module


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("suffix", ["", "-start"])
def test_every_collective_opcode_is_recognized(kind, suffix):
    op, _ = read(f"%a = f32[100] {kind}{suffix}(%x), {GROUPS}")
    assert is_collective(op)
    assert kind_of(op) == kind


@pytest.mark.parametrize("opcode", ["add", "all-reduce-done", "copy-start", "while"])
def test_other_opcodes_are_no_collectives(opcode):
    assert not is_collective(read(f"%a = f32[100] {opcode}(%x)")[0])


def test_transfer_to_the_host_is_no_collective():
    assert not is_collective(
        read("%a = (f32[100], token[]) send(%x), is_host_transfer=true")[0]
    )


@pytest.mark.parametrize("attribute", ["replica_groups={}", "source_target_pairs={}"])
def test_collective_of_unknown_kind_is_refused(attribute):
    op, _ = read(f"%a = f32[100] all-swap(%x), {attribute}")
    with pytest.raises(ValueError, match=r"a collective of an unknown kind:\n%a = f32"):
        is_collective(op)


def test_group_size_is_the_size_of_the_largest_group():
    groups = "channel_id=1, use_global_device_ids=true, replica_groups={{0,1,2},{3,4}}"
    assert group_size(*read(f"%a = f32[100] all-reduce(%x), {groups}")) == 3


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("f32[800] all-gather(%x)", [400]),
        ("(f32[100], f32[8,8]) all-reduce(%x, %p)", [400, 256]),
        ("f32[100] ragged-all-to-all(%x, %x, %n, %n, %n, %n)", [400]),
        ("f32[100] collective-broadcast(%x, %n), has_dynamic_root=true", [400]),
        ("f32[100] collective-broadcast(%x, %p), has_dynamic_root=false", [400, 256]),
        ("(f32[8,8], u32[], token[]) recv(%n)", [256]),
    ],
)
def test_handed_over_operands_have_their_bytes(instruction, expected):
    op, module = read(f"%a = {instruction}")
    assert [shape.bytes for shape in handed_over(op, module.entry)] == expected


def test_permute_in_place_is_refused():
    op, module = read(
        "%a = f32[100] collective-permute(%x, %x, %n, %n), channel_id=1,"
        " source_target_pairs={{0,1}}, slice_sizes={{10}}"
    )
    with pytest.raises(ValueError, match="it permutes slices in place"):
        handed_over(op, module.entry)
