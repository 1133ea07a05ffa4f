"""Tests reports on real programs, and the refusal of what is no program."""

import random
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.overlap import inspect

from ..internal.hlo import test_schedule, test_slices, test_trips
from . import program

X = jax.ShapeDtypeStruct((32, 16), jnp.float32)


@pytest.fixture
def step():
    """Sums over 8 devices the product of each (4, 16) array with its transpose."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    local = lambda x: lax.psum(x @ x.T, "data")  # noqa: E731
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
        )
    )


def test_a_synchronous_all_reduce_of_known_size(step):
    report = inspect(step, X)
    (c,) = report.collectives
    assert (c.kind, c.dtypes, c.group_size) == ("all-reduce", ("f32",), 8)
    assert (c.bytes, c.wire_bytes) == (64, 2 * 7 / 8 * 64)
    assert (c.asynchronous, c.times, c.share) == (False, 1, 0)
    assert "psum" in c.op_name
    assert report.flops == 2 * 4 * 4 * 16
    assert report.share == report.covered == 0


def test_the_mesh_is_that_of_the_arguments(step):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placed = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=NamedSharding(mesh, P("data"))
    )
    assert inspect(step, X).collectives[0].axes is None
    report = inspect(step, placed)
    assert report.collectives[0].axes == ("data",)
    assert report.covered_by == {("data",): 0}


def test_a_mesh_that_is_not_that_of_the_program():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placed = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=NamedSharding(mesh, P("data"))
    )
    # jit leaves out the first argument, of which only the shape is read.
    report = inspect(jax.jit(lambda x, y: y @ y.T + x.shape[0]), placed, X)
    assert report.collectives == ()


def test_in_a_scan():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x):
        body = lambda c, _: (lax.pmean(c @ x, "data"), None)  # noqa: E731
        return lax.scan(body, x, None, length=6)[0]

    f = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    report = inspect(jax.jit(f), jax.ShapeDtypeStruct((16, 16), jnp.float32))
    (c,) = report.collectives
    assert (c.times, c.bytes) == (6, 1024)
    assert report.flops == 6 * 2 * 16**3


def test_none():
    report = inspect(jax.jit(lambda x: x @ x.T), X)
    assert report.collectives == ()
    assert report.share is None
    assert "no collectives" in str(report)


def test_every_way_to_hand_it_in_gives_the_same(step):
    lowered = step.lower(X)
    compiled = lowered.compile()
    expected = inspect(step, X)
    for given in (lowered, compiled):
        assert inspect(given) == expected
    assert inspect(compiled.as_text()) == expected._replace(memory=None)


def test_compiler_options_are_those_given_or_the_programs_own(step):
    seen = []

    class Lowered(jax.stages.Lowered):
        def __init__(self):
            pass

        def compile(self, compiler_options=None):
            seen.append(compiler_options)
            return step.lower(X).compile()

    train = types.SimpleNamespace(
        lower=lambda x: Lowered(), compiler_options={"own": True}
    )
    inspect(train, X)
    inspect(train, X, compiler_options={"given": 1})
    inspect(train, X, compiler_options={})
    assert seen == [{"own": True}, {"given": 1}, None]


def test_a_function_never_jitted():
    def loss(x):
        return x

    with pytest.raises(ValueError, match=r"`program` must be .*inspect\(jax.jit\(loss"):
        inspect(loss, X)
    with pytest.raises(ValueError, match=r"`program` must be compiled.*got int"):
        inspect(3)


@pytest.mark.parametrize("text", ["", "  \n", "hello", "module @jit_f {"])
def test_text_that_is_no_hlo(text):
    with pytest.raises(ValueError, match="`program` must be HLO text, which begins"):
        inspect(text)


SYMBOL = re.compile(r"[A-Za-z_%$][\w.$-]*|\d+|[^\w\s]|\s+")


def damaged(text, rng):
    """Removes, doubles or replaces a line, or removes a part of a line."""
    lines = text.split("\n")
    at, how = rng.randrange(len(lines)), rng.randrange(5)
    symbols = SYMBOL.findall(lines[at]) or [""]
    here = rng.randrange(len(symbols))
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(at, rng.choice(lines))
    elif how == 2:
        del symbols[here : here + rng.randrange(1, 6)]
        lines[at] = "".join(symbols)
    else:
        symbols[here] = rng.choice([*symbols, str(rng.randrange(-3, 40))])
        lines[at] = "".join(symbols)
    return "\n".join(lines)


DAMAGED = {
    "loop": lambda step: program(test_trips.WHILE + DONE, test_trips.LOOP),
    "fusions": lambda step: program(
        f"{test_schedule.BEGIN}\n{test_schedule.GO_ON}\n{test_schedule.FINISH}",
        test_schedule.FUSED,
    ),
    "between slices": lambda step: test_slices.exchange("%e = f32[8,8] add(%p, %p)"),
    "compiled here": lambda step: step.lower(X).compile().as_text(),
}
DONE = "ROOT %r = f32[100] copy(%x)"


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_text_is_read_or_refused(step, name):
    """No error comes from inside: each refusal names the argument and a line."""
    text, rng = DAMAGED[name](step), random.Random(0)
    assert inspect(text)
    refused = []
    for _ in range(300):
        try:
            inspect(damaged(text, rng))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert {error[:18] for error in refused} == {"`program` must be "}


def test_text_without_schedule():
    text = program("ROOT %r = f32[100] copy(%x)", scheduled="false")
    with pytest.raises(ValueError, match=r"`program` must be scheduled.*got step with"):
        inspect(text)


def test_arguments_for_what_is_lowered_already(step):
    with pytest.raises(ValueError, match=r"`args` must be left out.* got 1 of them"):
        inspect(step.lower(X), X)


def test_options_for_what_is_compiled_already(step):
    with pytest.raises(ValueError, match="`compiler_options` must be left out"):
        inspect(step.lower(X).compile(), compiler_options={"a": 1})


def test_a_pmap_of_another_number_of_devices():
    """It is compiled for the devices of this machine, whatever the mesh is."""
    step = jax.pmap(lambda x: x @ x.T)
    says = (
        r"^`args` must have a first axis .* of which there are 8; got shapes \[\(16, 4"
    )
    with pytest.raises(ValueError, match=says):
        inspect(step, jax.ShapeDtypeStruct((16, 4, 4), "float32"))
    with pytest.raises(ValueError, match=r"^`args` must have a first axis"):
        inspect(step, jax.ShapeDtypeStruct((), "float32"))
    assert inspect(step, jax.ShapeDtypeStruct((8, 4, 4), "float32")).flops


def test_a_known_failure_of_xla_names_the_flag_that_helps(monkeypatch):
    def compile(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: number of output tile sizes")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    says = r"output tile sizes.*XLA_FLAGS=--xla_gpu_enable_triton_gemm=false"
    with pytest.raises(ValueError, match=says):
        inspect(jax.jit(lambda x: x @ x), jax.ShapeDtypeStruct((4, 4), "float32"))
