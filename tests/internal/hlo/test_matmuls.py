"""Tests FLOPs against closed forms, and against XLA's own count."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pipejax.overlap import inspect

from ...overlap import FLOPS, work

S = jax.ShapeDtypeStruct


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
def test_flops_equal_the_count_of_xla(name):
    f, *args = PROGRAMS[name]()
    compiled = jax.jit(f).lower(*args).compile()
    # The counts are equal, because these programs have no other arithmetic.
    assert inspect(compiled).flops == compiled.cost_analysis()["flops"]


def test_gradient_of_a_convolution_does_the_work_of_two():
    f, *args = PROGRAMS["padded"]()
    forward = inspect(jax.jit(f), *args).flops
    loss = lambda x, k: jnp.sum(f(x, k) ** 2)  # noqa: E731
    both = inspect(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), *args)
    assert both.flops == 3 * forward
    assert both.matmuls == 3


def test_tpu_matmul_as_a_convolution_is_counted():
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


def test_cublas_matmul_is_counted():
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
def test_cudnn_convolution_is_counted(target, operands, result):
    text = CUDNN.replace("TARGET", target).replace("OPERANDS", operands)
    found, _ = work(text.replace("RESULT", result + "{3,2,1,0}"))
    # In both dimensions, 9 places x 3 taps, less one tap on the padding at each end.
    assert found.flops == 2 * 2 * 3 * 4 * 25 * 25
    assert found.matmuls == 1


def test_ragged_dot_may_contract_several_dimensions():
    _, uncounted = work(
        "%a = f32[4,64,32] broadcast(%x)\n%b = f32[4,64,16] broadcast(%x)\n"
        "%n = s32[4] broadcast(%x)\n%d = f32[4,32,16] ragged-dot(%a, %b, %n),"
        " lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}, lhs_ragged_dims={1}"
    )
    assert uncounted


def test_matmul_of_inconsistent_shapes_is_refused():
    with pytest.raises(ValueError, match=r"its FLOPs cannot be counted:\n%d = "):
        work("%d = f32[8,8] dot(%p, %p), lhs_contracting_dims={7}")


@pytest.mark.parametrize(
    ("ragged", "flops"), [("{0}", 2 * 64 * 32 * 16), ("{1}", None)]
)
def test_ragged_dot_is_counted_if_rows_are_grouped(ragged, flops):
    """Rows are in groups, or the summed dimension is, which makes a result each."""
    found, uncounted = work(
        "%a = f32[64,32] broadcast(%x)\n%b = f32[4,32,16] broadcast(%x)\n"
        "%n = s32[4] broadcast(%x)\n%d = f32[64,16] ragged-dot(%a, %b, %n),"
        f" lhs_contracting_dims={{1}}, lhs_ragged_dims={ragged}"
    )
    assert found.flops == (flops or 0)
    assert bool(uncounted) == (flops is None)
