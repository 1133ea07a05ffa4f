"""FLOPs against closed forms, and against XLA's own count."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pipejax.overlap import inspect
from pipejax.overlap._flops import Counter
from pipejax.overlap._parse import parse

from . import DOT, FLOPS, dots, program

ROOT = "ROOT %r = f32[100]{0} add(%x, %x)"
S = jax.ShapeDtypeStruct


def work(entry, others=""):
    counter = Counter(parse(program(f"{entry}\n{ROOT}", others)))
    return counter.whole("main"), counter.uncounted


def conv(lhs, rhs, **kwargs):
    return lambda: (
        lambda x, k: lax.conv_general_dilated(
            x,
            k,
            kwargs.pop("strides", (1, 1)),
            kwargs.pop("padding", "SAME"),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            **kwargs,
        ),
        S(lhs, jnp.float32),
        S(rhs, jnp.float32),
    )


PROGRAMS = {
    "dot": lambda: (jnp.dot, S((64, 100), jnp.float32), S((100, 30), jnp.float32)),
    "batched": lambda: (
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
        S((5, 16, 20), jnp.float32),
        S((5, 20, 24), jnp.float32),
    ),
    "padded": conv((2, 9, 9, 3), (3, 3, 3, 4)),
    "strided": conv((2, 9, 9, 3), (3, 3, 3, 4), strides=(2, 2)),
    "valid": conv((2, 9, 9, 3), (3, 3, 3, 4), padding="VALID"),
    "dilated kernel": conv((2, 9, 9, 3), (3, 3, 3, 4), rhs_dilation=(2, 2)),
    "dilated input": conv(
        (2, 9, 9, 3), (3, 3, 3, 4), padding=((1, 2), (2, 1)), lhs_dilation=(2, 2)
    ),
    "grouped": conv((2, 9, 9, 6), (3, 3, 2, 9), feature_group_count=3),
    "grouped batch": conv((6, 9, 9, 2), (3, 3, 2, 9), batch_group_count=3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_xla_counts(name):
    f, *args = PROGRAMS[name]()
    compiled = jax.jit(f).lower(*args).compile()
    # Exactly: nothing else in these programs is an operation on numbers.
    assert inspect(compiled).flops == compiled.cost_analysis()["flops"]


def test_gradient_of_a_convolution_does_the_work_of_two():
    f, *args = PROGRAMS["padded"]()
    forward = inspect(jax.jit(f), *args).flops
    loss = lambda x, k: jnp.sum(f(x, k) ** 2)  # noqa: E731
    both = inspect(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), *args)
    assert both.flops == 3 * forward
    assert both.matmuls == 3


def test_dots_and_operations():
    found, uncounted = work(dots("d", "e"))
    assert (found.flops, found.matmuls, found.operations) == (2 * FLOPS, 2, 3)
    assert not uncounted


def test_a_tpu_matmul_is_a_convolution_with_holes():
    others = """
        %f (q: f32[4,16,32], w: f32[4,32,8]) -> f32[4,16,8] {
          %q = f32[4,16,32]{2,1,0} parameter(0)
          %w = f32[4,32,8]{2,1,0} parameter(1)
          ROOT %c = f32[4,16,8]{2,1,0} convolution(%q, %w), window={size=4 stride=3 \
pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf
        }
    """
    found, _ = work("%g = f32[4,16,8]{2,1,0} fusion(%p, %x), calls=%f", others)
    assert found.flops == 2 * 4 * 16 * 32 * 8
    assert (found.matmuls, found.operations) == (1, 2)


def test_cublas():
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_\
dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    for target in ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"):
        found, uncounted = work(
            "%g = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%p, %p),"
            f' custom_call_target="{target}", backend_config={config}'
        )
        assert found.flops == FLOPS
        assert not uncounted


CUDNN = """
%i = f32[2,9,9,3]{3,2,1,0} broadcast(%x)
%k = f32[4,3,3,3]{3,2,1,0} broadcast(%x)
%o = f32[2,9,9,4]{3,2,1,0} broadcast(%x)
%c = (RESULT, u8[0]{0}) custom-call(OPERANDS), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convTARGET"
"""


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("Forward", "%i, %k", "f32[2,9,9,4]"),
        ("BiasActivationForward", "%i, %k, %x", "f32[2,9,9,4]"),
        ("BackwardInput", "%o, %k", "f32[2,9,9,3]"),
        ("BackwardFilter", "%i, %o", "f32[4,3,3,3]"),
    ],
)
def test_cudnn(target, operands, result):
    text = CUDNN.replace("TARGET", target).replace("OPERANDS", operands)
    found, _ = work(text.replace("RESULT", result + "{3,2,1,0}"))
    # 9 places x 3 taps, less one tap on the padding at each end, in both dimensions.
    assert found.flops == 2 * 2 * 3 * 4 * 25 * 25
    assert found.matmuls == 1


def test_library_calls_that_cannot_be_counted_are_named():
    for target in (
        "__cudnn$fmhaSoftmax",
        "tpu_custom_call",
        "__cublas$gemm",
        "te_fused_attn_forward_ffi",
        "Cholesky",
    ):
        line = f'%g = f32[8,8]{{1,0}} custom-call(%p), custom_call_target="{target}"'
        for start in (line, line.replace("custom-call(", "custom-call-start(")):
            found, uncounted = work(start)
            assert found.flops == 0
            assert uncounted == {"g": f"{target}, its FLOPs counted as 0"}
    for target in ("__cub$DeviceRadixSort", "__gpu$TopK", "AllocateBuffer", "Sharding"):
        _, uncounted = work(
            f'%g = f32[8,8]{{1,0}} custom-call(), custom_call_target="{target}"'
        )
        assert not uncounted


LOOP = """
    %cond (c: (s32[], f32[8,8])) -> pred[] {
      %c = (s32[], f32[8,8]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%c), index=0
      %n = s32[] constant(7)
      ROOT %lt = pred[] compare(%i, %n), direction=LT
    }

    %body (b: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
      %b = (s32[], f32[8,8]{1,0}) parameter(0)
      %j = s32[] get-tuple-element(%b), index=0
      %p = f32[8,8]{1,0} get-tuple-element(%b), index=1
      %two = s32[] constant(2)
      %next = s32[] add(%j, %two)
      %d = f32[8,8]{1,0} DOT
      ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%next, %d)
    }
""".replace("DOT", DOT)
WHILE = """
    %zero = s32[] constant(1)
    %first = s32[] copy(%zero)
    %init = (s32[], f32[8,8]{1,0}) tuple(%first, %p)
    %w = (s32[], f32[8,8]{1,0}) while(%init), condition=%cond, body=%body
"""


def test_trip_count_as_the_backend_prints_it():
    config = ', backend_config={"known_trip_count":{"n":"12"}}'
    found, _ = work(WHILE.rstrip() + config, LOOP)
    assert (found.flops, found.matmuls) == (12 * FLOPS, 12)


def test_trip_count_of_a_counting_loop():
    found, uncounted = work(WHILE, LOOP)
    assert found.flops == 3 * FLOPS  # i = 1, 3, 5
    assert not uncounted


@pytest.mark.parametrize(
    ("known", "unknown"),
    [
        ("direction=LT", "direction=NE"),
        ("%first = s32[] copy(%zero)", "%first = s32[] negate(%zero)"),
        ("%next = s32[] add", "%next = s32[] multiply"),
        # Another element than the one that is compared; a step down.
        (
            "%j = s32[] get-tuple-element(%b), index=0",
            "%j = s32[] get-tuple-element(%b), index=1",
        ),
        ("%two = s32[] constant(2)", "%two = s32[] constant(-2)"),
        ("%n = s32[] constant(7)", "%n = s32[] get-tuple-element(%c), index=0"),
    ],
)
def test_a_loop_of_unknown_length_counts_once_and_is_named(known, unknown):
    assert known in WHILE + LOOP
    found, uncounted = work(WHILE.replace(known, unknown), LOOP.replace(known, unknown))
    assert found.flops == FLOPS
    assert uncounted == {"w": "a loop of unknown length, counted once"}


def test_a_trip_count_that_is_no_number():
    config = ', backend_config={"known_trip_count":{"n":"many"}}'
    with pytest.raises(ValueError, match=r"its trip count is .*many.*\n%w = "):
        work(WHILE.rstrip() + config, LOOP)


def test_a_matmul_whose_shapes_do_not_fit():
    with pytest.raises(ValueError, match=r"its FLOPs cannot be counted:\n%d = "):
        work("%d = f32[8,8] dot(%p, %p), lhs_contracting_dims={7}")


@pytest.mark.parametrize(
    ("ragged", "flops"), [("{0}", 2 * 64 * 32 * 16), ("{1}", None)]
)
def test_ragged_dots(ragged, flops):
    """Rows in groups; what is summed over in groups, which makes as many results."""
    found, uncounted = work(
        "%a = f32[64,32] broadcast(%x)\n%b = f32[4,32,16] broadcast(%x)\n"
        "%n = s32[4] broadcast(%x)\n%d = f32[64,16] ragged-dot(%a, %b, %n),"
        f" lhs_contracting_dims={{1}}, lhs_ragged_dims={ragged}"
    )
    assert found.flops == (flops or 0)
    assert bool(uncounted) == (flops is None)


def test_a_matmul_in_an_instruction_that_repeats_it():
    others = """
        %f (p: f32[8,8]) -> f32[8,8] {
          %p = f32[8,8]{1,0} parameter(0)
          ROOT %d = f32[8,8]{1,0} DOT
        }
    """.replace("DOT", DOT)
    found, uncounted = work("%s = f32[8,8] scan(%p), to_apply=%f", others)
    assert found.flops == FLOPS
    assert uncounted == {"s": "scan of a matmul, counted once"}


def test_a_conditional_counts_as_its_largest_branch():
    others = """
        %none (p: f32[8,8]) -> f32[8,8] {
          ROOT %p = f32[8,8]{1,0} parameter(0)
        }

        %some (p: f32[8,8]) -> f32[8,8] {
          %p = f32[8,8]{1,0} parameter(0)
          ROOT %d = f32[8,8]{1,0} DOT
        }
    """.replace("DOT", DOT)
    branches = "branch_computations={%none, %some}"
    found, _ = work(f"%c = f32[8,8] conditional(%x, %p, %p), {branches}", others)
    assert (found.flops, found.matmuls, found.operations) == (FLOPS, 1, 2)
    found, _ = work("%c = f32[8,8] call(%p), to_apply=%some", others)
    assert found.flops == FLOPS
