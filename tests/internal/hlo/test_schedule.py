"""Tests where collectives begin and end, in every form that backends write."""

import pytest

from pipejax.overlap import inspect

from ...overlap import DOT, FLOPS, GROUPS, dots, program

AR = f"all-reduce(%x), {GROUPS}"
START = f"%s = (f32[100]{{0}}, f32[100]{{0}}) all-reduce-start(%x), {GROUPS}"
DONE = "ROOT %r = f32[100]{0} all-reduce-done(%s)"


def read(*entry, others=""):
    return inspect(program("\n".join(entry), others))


def only(*entry, others=""):
    (collective,) = read(*entry, others=others).collectives
    return collective


def test_synchronous_collective_overlaps_nothing():
    c = only(
        dots("a"), f"%s = f32[100]{{0}} {AR}", dots("b"), "ROOT %r = f32[100] copy(%s)"
    )
    assert (c.name, c.kind, c.asynchronous) == ("s", "all-reduce", False)
    assert (c.operations, c.matmuls, c.share) == (0, 0, 0)


def test_start_marked_as_sync_on_a_gpu_is_synchronous():
    config = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    c = only(START + config, dots("a"), DONE)
    assert not c.asynchronous
    assert c.matmuls == 0


def test_operations_between_start_and_done_are_counted():
    report = read(
        dots("a"),
        START,
        "%copy-start = (f32[8,8], f32[8,8]) copy-start(%a)",
        dots("b", "c"),
        "%e = f32[8,8] add(%b, %c)",
        "%bit = f32[64] bitcast(%e)",
        "%copy-done = f32[8,8] copy-done(%copy-start)",
        DONE.removeprefix("ROOT "),
        dots("d"),
        "ROOT %out = f32[100] negate(%r)",
    )
    (c,) = report.collectives
    assert c.asynchronous
    assert (c.operations, c.matmuls, c.flops) == (3, 2, 2 * FLOPS)
    assert c.share == report.share == report.covered == 0.5


@pytest.mark.parametrize(
    "kind",
    [
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    ],
)
def test_every_kind_of_collective_is_found(kind):
    lines = [line.replace("all-reduce", kind) for line in (START, DONE)]
    c = only(lines[0], dots("a"), lines[1])
    assert (c.kind, c.matmuls) == (kind, 1)
    c = only(dots("a"), f"ROOT %r = f32[100]{{0}} {AR}".replace("all-reduce", kind))
    assert (c.kind, c.asynchronous) == (kind, False)


PAIRS = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}"


def test_send_and_receive_are_followed_to_their_ends():
    send, receive = read(
        "%k = token[] after-all()",
        f"%s = (f32[100], u32[], token[]) send(%x, %k), channel_id=1, {PAIRS}",
        dots("a"),
        f"%t = (f32[100], u32[], token[]) recv(%k), channel_id=1, {PAIRS}",
        dots("b"),
        "%sd = token[] send-done(%s), channel_id=1",
        dots("c"),
        "%rd = (f32[100], token[]) recv-done(%t), channel_id=1",
        "ROOT %r = f32[100] get-tuple-element(%rd), index=0",
    ).collectives
    assert (send.kind, send.matmuls, send.bytes, send.wire_bytes) == (
        ("send", 2, 400, 400)
    )
    assert (receive.kind, receive.matmuls, receive.bytes) == ("recv", 2, 400)
    assert receive.wire_bytes == 0
    assert send.group_size == receive.group_size == 3


def test_transfer_to_the_host_is_no_collective():
    report = read(
        "%k = token[] after-all()",
        "%s = (f32[100], u32[], token[]) send(%x, %k), is_host_transfer=true",
        "%sd = token[] send-done(%s), is_host_transfer=true",
        "ROOT %r = f32[100] copy(%x)",
    )
    assert not report.collectives


WRAPPED = f"""
    %wrapped (q: f32[100]) -> f32[100] {{
      %q = f32[100]{{0}} parameter(0)
      ROOT %rs = f32[100]{{0}} reduce-scatter(%q), {GROUPS}
    }}
"""


def test_collective_in_an_async_wrapper_is_followed():
    c = only(
        "%s = ((f32[100]), f32[100]) async-start(%x), calls=%wrapped",
        dots("a"),
        "%u = ((f32[100]), f32[100]) async-update(%s)",
        dots("b"),
        "ROOT %r = f32[100] async-done(%u)",
        dots("c"),
        others=WRAPPED,
    )
    assert (c.name, c.kind, c.matmuls, c.bytes) == ("s", "reduce-scatter", 2, 400)


def test_collectives_started_together_are_followed_separately():
    """They begin as a group or in an asynchronous fusion, with or without a call."""
    others = f"""
        %inner (q: f32[100]) -> f32[100] {{
          %q = f32[100]{{0}} parameter(0)
          ROOT %ar = f32[100]{{0}} all-reduce(%q), {GROUPS}
        }}

        %fused (q: f32[100]) -> f32[100] {{
          %q = f32[100]{{0}} parameter(0)
          %c = f32[100]{{0}} call(%q), to_apply=%inner
          ROOT %ag = f32[800]{{0}} all-gather(%c), {GROUPS}
        }}

        %group (q: f32[100]) -> f32[100] {{
          %q = f32[100]{{0}} parameter(0)
          ROOT %f = f32[100]{{0}} fusion(%q), kind=kCustom, calls=%fused
        }}
    """
    report = read(
        "%s = ((f32[100]), f32[100]) async-start(%x), calls=%group",
        dots("a"),
        "ROOT %r = f32[100] async-done(%s)",
        others=others,
    )
    found = [(c.name, c.kind, c.matmuls) for c in report.collectives]
    assert found == [("s/ar", "all-reduce", 1), ("s/ag", "all-gather", 1)]
    drawn = [x.name for x in report.schedule if x.kind.startswith("all-")]
    assert drawn == ["s/ar", "s/ag"]


def test_asynchronous_compute_is_no_collective():
    others = WRAPPED.replace(f"reduce-scatter(%q), {GROUPS}", "add(%q, %q)")
    report = read(
        "%s = ((f32[100]), f32[100]) fusion-start(%x), kind=kLoop, calls=%wrapped",
        "ROOT %r = f32[100] fusion-done(%s)",
        others=others,
    )
    assert not report.collectives


def test_sparse_core_collective_begins_with_its_operands():
    thread = 'async_execution_thread="sparsecore", to_apply=%wrapped'
    prepared = only(
        f"%s = ((), (), (s32[1]{{0}})) call-start(), {thread}",
        dots("a"),
        "%u = ((f32[100]), f32[100]) call-update(%s, %x)",
        dots("b", "c"),
        "ROOT %r = f32[100] call-done(%u)",
        others=WRAPPED,
    )
    assert (prepared.kind, prepared.matmuls) == ("reduce-scatter", 2)
    at_once = only(
        f"%s = ((f32[100]), f32[100]) call-start(%x), {thread}",
        dots("a"),
        "%u = ((f32[100]), f32[100]) call-update(%s)",
        dots("b", "c"),
        "ROOT %r = f32[100] call-done(%u)",
        others=WRAPPED,
    )
    assert at_once.matmuls == 3


FUSED = f"""
    %begin (q: f32[100]) -> (f32[100], u32[]) {{
      %q = f32[100] parameter(0)
      %ar = f32[100] {AR.replace("%x", "%q")}
      ROOT %cc = (f32[100], u32[]) custom-call(%ar), \
custom_call_target="AsyncCollectiveStart"
    }}

    %go_on (q: f32[100], p: f32[8,8]) -> (f32[100], f32[8,8]) {{
      %q = f32[100] parameter(0)
      %p = f32[8,8] parameter(1)
      %d = f32[8,8] {DOT}
      %ar = f32[100] {AR.replace("%x", "%q")}
      ROOT %t = (f32[100], f32[8,8]) tuple(%ar, %d)
    }}

    %finish (q: f32[100]) -> f32[100] {{
      %q = f32[100] parameter(0)
      %ar = f32[100] {AR.replace("%x", "%q")}
      ROOT %cc = f32[100] custom-call(%ar), custom_call_target="AsyncCollectiveDone"
    }}
"""
BEGIN = "%s = (f32[100], u32[]) fusion(%x), kind=kCustom, calls=%begin"
GO_ON = "%go = (f32[100], f32[8,8]) fusion(%x, %p), kind=kOutput, calls=%go_on"
FINISH = "ROOT %r = f32[100] fusion(%x), kind=kCustom, calls=%finish"


def test_fusions_continuing_a_collective_on_tpu_v5e_are_followed():
    c = only(dots("a"), BEGIN, GO_ON, dots("b"), FINISH, others=FUSED)
    assert (c.name, c.kind, c.asynchronous) == ("s", "all-reduce", True)
    assert (c.matmuls, c.operations, c.share) == (2, 2, 2 / 3)


def test_fused_collective_without_a_start_is_synchronous():
    lone = FUSED[FUSED.index("%go_on") : FUSED.index("%finish")]
    c = only(GO_ON, "ROOT %r = f32[100] copy(%x)", others=lone)
    assert (c.name, c.asynchronous, c.matmuls) == ("go", False, 0)


def loop(body, trips=5):
    """Returns a `while` over (i, p, x) with the given body."""
    state = "(s32[], f32[8,8], f32[100])"
    others = f"""
%cond (c: {state}) -> pred[] {{
  %c = {state} parameter(0)
  ROOT %go = pred[] custom-call(%c), custom_call_target="go"
}}

%body (carry: {state}) -> {state} {{
  %carry = {state} parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %p = f32[8,8] get-tuple-element(%carry), index=1
  %x = f32[100] get-tuple-element(%carry), index=2
  {body}
}}
"""
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    entry = [
        "%zero = s32[] constant(0)",
        f"%init = {state} tuple(%zero, %p, %x)",
        f"%w = {state} while(%init), condition=%cond, body=%body, {config}",
        "ROOT %out = f32[100] get-tuple-element(%w), index=2",
    ]
    return entry, others


def test_collective_around_a_loop_covers_its_iterations():
    entry, others = loop(
        f"{dots('a')}\nROOT %t = (s32[], f32[8,8], f32[100]) tuple(%i, %a, %x)"
    )
    entry[-1] = entry[-1].removeprefix("ROOT ")
    report = read(START, *entry, DONE, others=others)
    (c,) = report.collectives
    assert (c.times, c.matmuls, c.share) == (1, 5, 1)


def test_collective_between_iterations_is_followed():
    state = "(s32[], f32[8,8], f32[100])"
    entry, others = loop(
        f"{dots('a')}\n%done = f32[100] all-reduce-done(%x)\n{dots('b')}\n"
        f"%s = f32[100] all-reduce-start(%done), {GROUPS}\n{dots('c')}\n"
        f"ROOT %t = {state} tuple(%i, %c, %s)"
    )
    first = START.replace("%s", "%first")
    entry[1] = entry[1].replace("%p, %x)", "%p, %first)")
    entry[-1] = entry[-1].removeprefix("ROOT ")
    report = read(
        first,
        dots("before"),
        *entry,
        dots("after"),
        "ROOT %r = f32[100] all-reduce-done(%out)",
        others=others,
    )
    before, inside = report.collectives
    assert (before.name, before.times, before.matmuls) == ("first", 1, 1)
    # The collective covers c up to the end of the body, and a from the top to the done.
    # It does not cover b.
    assert (inside.name, inside.times, inside.matmuls) == ("s", 5, 10)
    assert report.covered == pytest.approx((1 + 10) / 17)


def test_two_collectives_in_flight_between_iterations_are_followed():
    entry, others = loop(
        f"%s = f32[100] all-reduce-start(%x), {GROUPS}\n{dots('a', 'b')}\n"
        "%done = f32[100] all-reduce-done(%x)\n"
        "ROOT %t = (s32[], f32[8,8], f32[100]) tuple(%i, %b, %s)"
    )
    report = read(*entry, others=others)
    assert report.collectives[0].matmuls == 10
    assert report.covered == 1


def test_unknown_asynchronous_instruction_is_refused():
    with pytest.raises(ValueError, match=r"'swap-start' may hide a collective.*\n%s ="):
        read("%s = f32[100] swap-start(%x)", DONE)


def test_unknown_collective_is_refused():
    line = f"%s = f32[100] all-swap(%x), {GROUPS}"
    with pytest.raises(ValueError, match="a collective of an unknown kind:\n%s = f32"):
        read(line, "ROOT %r = f32[100] copy(%s)")


def test_start_without_an_end_is_refused():
    with pytest.raises(
        ValueError, match=r"this one is started and never waited for:\n%s"
    ):
        read(START, "ROOT %r = f32[100] copy(%x)")
    with pytest.raises(ValueError, match="this one is started and never waited for"):
        read(BEGIN, "ROOT %r = f32[100] copy(%x)", others=FUSED)


def test_end_without_a_start_is_refused():
    with pytest.raises(ValueError, match="this one is waited for and started nowhere"):
        read(DONE.replace("%s", "%x"))
    with pytest.raises(ValueError, match="this one is waited for and started nowhere"):
        read(FINISH, others=FUSED)


def test_fusion_started_twice_is_refused():
    with pytest.raises(ValueError, match="this one is started while it is in progress"):
        read(BEGIN, BEGIN.replace("%s", "%s2"), FINISH, others=FUSED)
