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


def test_synchronous_all_reduce_is_reported_with_its_size(step):
    report = inspect(step, X)
    (c,) = report.collectives
    assert (c.kind, c.dtypes, c.group_size) == ("all-reduce", ("f32",), 8)
    assert (c.bytes, c.wire_bytes) == (64, 2 * 7 / 8 * 64)
    assert (c.asynchronous, c.times, c.share) == (False, 1, 0)
    assert "psum" in c.op_name
    assert report.flops == 2 * 4 * 4 * 16
    assert report.share == report.covered == 0


def test_mesh_is_taken_from_the_arguments(step):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placed = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=NamedSharding(mesh, P("data"))
    )
    assert inspect(step, X).collectives[0].axes is None
    report = inspect(step, placed)
    assert report.collectives[0].axes == ("data",)
    assert report.covered_by == {("data",): 0}


def test_mesh_of_a_dropped_argument_is_harmless():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placed = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=NamedSharding(mesh, P("data"))
    )
    # jit leaves out the first argument, of which only the shape is read.
    report = inspect(jax.jit(lambda x, y: y @ y.T + x.shape[0]), placed, X)
    assert report.collectives == ()


def test_collective_in_a_scan_is_counted_for_every_iteration():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x):
        body = lambda c, _: (lax.pmean(c @ x, "data"), None)  # noqa: E731
        return lax.scan(body, x, None, length=6)[0]

    f = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    report = inspect(jax.jit(f), jax.ShapeDtypeStruct((16, 16), jnp.float32))
    (c,) = report.collectives
    assert (c.times, c.bytes) == (6, 1024)
    assert report.flops == 6 * 2 * 16**3


def test_program_without_collectives_has_no_share():
    report = inspect(jax.jit(lambda x: x @ x.T), X)
    assert report.collectives == ()
    assert report.share is None
    assert "no collectives" in str(report)


def test_lowered_compiled_and_text_give_the_same_report(step):
    lowered = step.lower(X)
    compiled = lowered.compile()
    expected = inspect(step, X)
    for given in (lowered, compiled):
        assert inspect(given) == expected
    assert inspect(compiled.as_text()) == expected._replace(memory=None)


def test_given_compiler_options_replace_options_of_the_program(step):
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


def test_function_without_jit_is_refused():
    def loss(x):
        return x

    with pytest.raises(ValueError, match=r"`program` must be .*inspect\(jax.jit\(loss"):
        inspect(loss, X)
    with pytest.raises(ValueError, match=r"`program` must be compiled.*got int"):
        inspect(3)


@pytest.mark.parametrize("text", ["", "  \n", "hello", "module @jit_f {"])
def test_text_other_than_hlo_is_refused(text):
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


def test_text_without_schedule_is_refused():
    text = program("ROOT %r = f32[100] copy(%x)", scheduled="false")
    with pytest.raises(ValueError, match=r"`program` must be scheduled.*got step with"):
        inspect(text)


def test_arguments_for_a_lowered_program_are_refused(step):
    with pytest.raises(ValueError, match=r"`args` must be left out.* got 1 of them"):
        inspect(step.lower(X), X)


def test_options_for_a_compiled_program_are_refused(step):
    with pytest.raises(ValueError, match="`compiler_options` must be left out"):
        inspect(step.lower(X).compile(), compiler_options={"a": 1})


def test_pmap_over_another_number_of_devices_is_refused():
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


def test_known_failure_of_xla_names_a_helpful_flag(monkeypatch):
    def compile(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: number of output tile sizes")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    says = r"output tile sizes.*XLA_FLAGS=--xla_gpu_enable_triton_gemm=false"
    with pytest.raises(ValueError, match=says):
        inspect(jax.jit(lambda x: x @ x), jax.ShapeDtypeStruct((4, 4), "float32"))
