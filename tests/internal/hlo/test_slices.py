"""Tests exchanges between slices in written text; `test_programs` has real ones."""

import pytest

from pipejax._internal.hlo._parse import parse
from pipejax._internal.hlo._slices import groups_by_id
from pipejax.overlap import inspect

from ...overlap import dots, program

SEND = "%s = (f32[100], u32[], token[]) send(%x, %k), is_host_transfer=true"
RECV = "%t = (f32[100], u32[], token[]) recv(%k), is_host_transfer=true"
DONE = "%sd = token[] send-done(%s), is_host_transfer=true"
ARRIVED = "%td = (f32[100], token[]) recv-done(%t), is_host_transfer=true"
ROOT = "ROOT %r = f32[100] get-tuple-element(%td), index=0"


def megascale(kind="ALL_REDUCE", target='"{1,2}x{0:3}"', key="psum.7_0"):
    return (
        f', frontend_attributes={{_xla_host_transfer_rendezvous="{key}",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )


def exchange(*between, send=None, recv=None):
    """Returns a send, its receive and both ends, with other lines in between."""
    send, recv = SEND + (send or megascale()), RECV + (recv or megascale())
    rest = iter(between)
    lines = ["%k = token[] after-all()"]
    for line in (send, recv, DONE, ARRIVED):
        lines += [line, next(rest, "")]
    return program("\n".join([*lines, ROOT]))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ('"{1,2}x{0:1}"', {(100000, 200000), (100001, 200001)}),
        ('"{2,1,4}x{0,3}"', {(100000, 200000, 400000), (100003, 200003, 400003)}),
        ('"{1:3}x{5}"', {(100005, 200005, 300005)}),
        ("{{100000,300002},{200000,400001}}", {(100000, 300002), (200000, 400001)}),
        ("{{100003->200000},{200000->300000}}", {(100003, 200000, 300000)}),
        (
            "{{100000->200000},{200000->100000},{100001->200001}}",
            {(100000, 200000), (100001, 200001)},
        ),
    ],
)
def test_targets_are_read_as_groups_of_devices(target, expected):
    send = parse(exchange(send=megascale(target=target))).entry["s"]
    assert {tuple(sorted(group)) for group in groups_by_id(send)} == expected


@pytest.mark.parametrize(
    ("kind", "expected", "sent"),
    [
        ("ALL_REDUCE", "all-reduce", 600),
        ("ALL_GATHER", "all-gather", 1200),
        ("REDUCE_SCATTER", "reduce-scatter", 300),
        ("ALL_TO_ALL", "all-to-all", 300),
        ("ONE_TO_ONE", "collective-permute", 400),
    ],
)
def test_kinds_of_slice_transfers_are_read_with_their_bytes(kind, expected, sent):
    report = inspect(exchange(send=megascale(kind, target='"{1,2,3,4}x{0:3}"')))
    (c,) = report.collectives
    assert (c.kind, c.group_size, c.bytes, c.wire_bytes) == (expected, 4, 400, sent)


def test_slice_transfer_lasts_from_send_to_arrival():
    text = exchange(dots("a"), dots("b"), dots("c"), dots("d"))
    (c,) = inspect(text).collectives
    assert (c.name, c.asynchronous, c.matmuls, c.share) == ("s", True, 3, 0.75)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (exchange(send=megascale("BY_PIGEON")), "of an unknown type"),
        (exchange(send=megascale(target='"{1,2}"')), "target has an unknown form"),
        (exchange(send=megascale(target="{{a,b}}")), "target has an unknown form"),
        (exchange(recv=megascale(key="other")), "no `recv` in its computation"),
        (
            exchange(send=megascale().replace("_rendezvous", "_date")),
            "it has no rendezvous key that leads to its other half",
        ),
        (
            exchange(send=megascale().replace("_target", "_aim")),
            "target has an unknown form",
        ),
    ],
)
def test_unknown_slice_transfers_are_refused(text, why):
    with pytest.raises(ValueError, match=rf"{why}.*:\n%s = "):
        inspect(text)
