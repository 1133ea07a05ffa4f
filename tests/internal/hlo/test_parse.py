"""Tests the parser from lines of text to instructions."""

import jax
import jax.numpy as jnp
import pytest

from pipejax._internal.hlo._module import Shape
from pipejax._internal.hlo._parse import parse

from ...overlap import GROUPS, dots, program

ROOT = "ROOT %r = f32[100]{0} add(%x, %x)"


def instruction(line, others=""):
    return parse(program(f"{line}\n{ROOT}", others)).entry.instructions[2]


def test_module_is_parsed_with_its_instructions():
    module = parse(program(f"{dots('d')}\n{ROOT}"))
    assert (module.name, module.is_scheduled) == ("step", True)
    assert (module.num_partitions, module.replica_count) == (8, 1)
    assert list(module.computations) == ["add", "main"]
    assert [op.name for op in module.entry.instructions] == ["p", "x", "d", "r"]
    assert module.entry.root.name == "r"
    assert module.entry.shapes_of(("p", "x")) == [
        Shape("f32", (8, 8)),
        Shape("f32", (100,)),
    ]


def test_tiled_layouts_comments_and_strings_are_parsed():
    op = instruction(
        "%f = (bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, /*index=2*/f32[3]{0})"
        " fusion(%p, /*index=1*/%x), kind=kLoop, calls=%add, output_to_operand_aliasing"
        "={{1}: (0, {})}, metadata={op_name=\"state[\\'w, {\\']\" stack_frame_id=3},"
        ' backend_config={"a":{"b":["}"]},"c":1}'
    )
    assert op.shapes == (Shape("bf16", (2, 8)), Shape("u32", ()), Shape("f32", (3,)))
    assert op.operands == ("p", "x")
    assert op.calls == ("add",)
    assert op.op_name == "state['w, {']"
    assert op.config == {"a": {"b": ["}"]}, "c": 1}
    assert op.attributes["output_to_operand_aliasing"] == "{{1}: (0, {})}"


def test_operands_of_older_texts_are_parsed():
    op = instruction(
        "%g = f32[8,8]{1,0} custom-call(f32[8,8]{1,0} %p, f32[8,8]{1,0} %p),"
        ' custom_call_target="__cublas$gemm", backend_config="{\\"n\\":\\"1\\"}"'
    )
    assert op.operands == ("p", "p")
    assert op.target == "__cublas$gemm"
    assert op.config == {"n": "1"}


def test_literals_are_no_operands():
    op = instruction("%c = f32[2,2]{1,0} constant({ {1, 2}, {3, 4} })")
    assert (op.operands, op.literal) == ((), "{ {1, 2}, {3, 4} }")


def test_branches_count_as_calls():
    op = instruction(
        "%c = f32[] conditional(%p, %x, %x), branch_computations={%add, %add}"
    )
    assert op.calls == ("add", "add")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("%d: x = f32[8] add(%x, %x)", "an instruction has the form"),
        ("%d = f32[8]{0}", "it has no opcode"),
        ("%d = f32[8]{0} add(%x, %x", "a bracket is not closed"),
        ("%d = f32[8]{0} add(%x, %x), nonsense", "'nonsense' is not an attribute"),
        ("%d = f32[8]{0} add(%x, %r)", "%r must be defined before it, and only once"),
        ("%x = f32[8]{0} add(%p, %p)", "%x must be defined before it, and only once"),
        ("%d = f32[8]{0} call(%x), to_apply=%gone", "%gone must be defined before it"),
        ("%d = f32[eight]{0} add(%x, %x)", "an unknown shape"),
    ],
)
def test_unknown_line_is_shown_in_the_message(line, why):
    with pytest.raises(ValueError, match=why) as caught:
        parse(program(f"{line}\n{ROOT}"))
    assert line in str(caught.value)


def test_unknown_text_between_computations_is_refused():
    text = program(ROOT).replace("%add (a", "surprise\n%add (a")
    with pytest.raises(ValueError, match=r"no computation begins here:\nsurprise"):
        parse(text)


def test_text_without_entry_or_root_is_refused():
    with pytest.raises(ValueError, match="inside a computation or has no ENTRY"):
        parse(program(ROOT).replace("ENTRY ", ""))
    with pytest.raises(ValueError, match="inside a computation or has no ENTRY"):
        parse(program(ROOT)[:-2])
    with pytest.raises(ValueError, match="has 0 ROOT instructions"):
        parse(program(dots("d")))


def test_program_of_the_installed_jax_is_parsed():
    def f(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, None, length=3)
        return jax.lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, jnp.linalg.norm(y))

    text = jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text()
    module = parse(text)
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    parsed = [op for c in module.computations.values() for op in c.instructions]
    assert [op.line for op in parsed] == [line.strip() for line in lines]
    assert module.is_scheduled


def test_collective_keeps_its_attributes():
    line = f"%a = f32[100]{{0}} all-reduce(%x), {GROUPS}"
    assert instruction(line).attributes["channel_id"] == "1"
