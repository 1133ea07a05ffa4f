"""Provides small programs that are scheduled by hand."""

from pipejax._internal.hlo._flops import Counter
from pipejax._internal.hlo._parse import parse

DOT = "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
FLOPS = 2 * 8**3  # FLOPs of one DOT
GROUPS = (
    "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true,"
    " to_apply=%add"
)
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def program(entry, others="", scheduled="true"):
    """Returns HLO text whose ENTRY has the parameters p: f32[8,8] and x: f32[100]."""
    return "\n".join(
        [
            f"HloModule step, is_scheduled={scheduled}, num_partitions=8",
            ADD,
            _indented(others),
            "ENTRY %main (p: f32[8,8], x: f32[100]) -> f32[100] {",
            "  %p = f32[8,8]{1,0} parameter(0)",
            "  %x = f32[100]{0} parameter(1)",
            _indented(entry),
            "}",
        ]
    )


def work(entry, others=""):
    """Returns the work of a program with these lines, and its uncounted parts."""
    root = "ROOT %r = f32[100]{0} add(%x, %x)"
    counter = Counter(parse(program(f"{entry}\n{root}", others)))
    return counter.whole("main"), counter.uncounted


def _indented(lines):
    """Indents instructions by two spaces, and nothing that encloses instructions."""
    stripped = [line.strip() for line in lines.splitlines() if line.strip()]
    return "\n".join(f"  {x}" if " = " in x else x for x in stripped)


def dots(*names):
    """Returns a matmul on each line."""
    return "\n".join(f"%{name} = f32[8,8]{{1,0}} {DOT}" for name in names)


HIDDEN = f"""
%s = (f32[100]{{0}}, f32[100]{{0}}) all-reduce-start(%x), {GROUPS}, \
metadata={{op_name="jit(step)/psum"}}
{dots("a", "b")}
%e = f32[8,8] add(%a, %b)
%sd = f32[100]{{0}} all-reduce-done(%s)
%u = u8[300]{{0}} convert(%sd)
%v = u8[300]{{0}} all-gather(%u), {GROUPS}
ROOT %r = f32[100] copy(%sd)
"""
