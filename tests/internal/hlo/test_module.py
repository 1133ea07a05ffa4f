"""Tests what is read from single instructions, and the errors for bad ones."""

import pytest

from pipejax._internal.hlo._module import Shape, split
from pipejax._internal.hlo._parse import parse

from ...overlap import program


def instruction(line):
    return parse(program(f"{line}\nROOT %r = f32[100]{{0}} add(%x, %x)")).entry["a"]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bf16", 16), ("u8", 8), ("s4", 4), ("pred", 8), ("c64", 64), ("f8e4m3fn", 8)],
)
def test_bytes_of_a_shape_follow_its_dtype(dtype, bits):
    assert Shape(dtype, (3, 4)).bytes == 12 * bits / 8


def test_token_has_no_bytes():
    assert Shape("token", ()).bytes == 0


def test_split_keeps_brackets_and_strings_together():
    assert split('a={1,2}, b="x, (y", c') == ["a={1,2}", 'b="x, (y"', "c"]
    assert split("") == []


def test_missing_operand_or_attribute_is_refused():
    op = instruction("%a = f32[100] get-tuple-element(%x), index=two")
    assert (op.operand(), op.attribute("index")) == ("x", "two")
    with pytest.raises(ValueError, match=r"it has 1 operands:\n%a = f32"):
        op.operand(1)
    with pytest.raises(ValueError, match=r"it has no attribute 'body':\n%a = f32"):
        op.attribute("body")
    with pytest.raises(ValueError, match=r"'two' is not an index:\n%a = f32"):
        _ = op.index


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"a":{"n":"3"}}', {"a": {"n": "3"}}),
        ('"{\\"n\\":\\"1\\"}"', {"n": "1"}),
        ("{uplo = 76 : ui8}", {}),
        ("[1,2]", {}),
    ],
)
def test_backend_config_is_read_as_json(config, expected):
    assert instruction(f"%a = f32[100] copy(%x), backend_config={config}").config == (
        expected
    )


def test_frontend_attributes_are_read_as_strings():
    op = instruction(
        '%a = f32[100] copy(%x), frontend_attributes={a={{0,1},{1,2}},b="{1}x{0:3}"}'
    )
    assert op.frontend == {"a": "{{0,1},{1,2}}", "b": "{1}x{0:3}"}
    assert instruction("%a = f32[100] copy(%x)").frontend == {}


def test_long_line_is_shortened_in_the_message():
    long = "x" * 1000
    op = instruction(f'%a = f32[100] copy(%x), metadata={{op_name="{long}"}}')
    with pytest.raises(ValueError, match=r"x\.\.\.$"):
        op.operand(1)
