"""Tests the work of instructions and computations, and the parts not counted."""

from ...overlap import DOT, FLOPS, dots, work


def test_flops_and_operations_of_dots_are_counted():
    found, uncounted = work(dots("d", "e"))
    assert (found.flops, found.matmuls, found.operations) == (2 * FLOPS, 2, 3)
    assert not uncounted


def test_library_calls_of_unknown_flops_are_named():
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


def test_matmul_inside_a_repeating_instruction_is_counted_once():
    others = """
        %f (p: f32[8,8]) -> f32[8,8] {
          %p = f32[8,8]{1,0} parameter(0)
          ROOT %d = f32[8,8]{1,0} DOT
        }
    """.replace("DOT", DOT)
    found, uncounted = work("%s = f32[8,8] scan(%p), to_apply=%f", others)
    assert found.flops == FLOPS
    assert uncounted == {"s": "scan of a matmul, counted once"}


def test_conditional_counts_as_its_largest_branch():
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
