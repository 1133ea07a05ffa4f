"""The result of `inspect`: numbers, and a table that prints them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._memory import Memory

_NONE = """\
no collectives: the program has no communication to hide. Possible reasons:
- The program runs on one device. JAX_NUM_CPU_DEVICES=8 in the environment splits a CPU
  into eight devices.
- The program was compiled without a mesh: with jit, but without shard_map or shardings.
- XLA removed the collectives, because no result of the program depends on them.
- The host executor runs the all-reduce as a separate program."""


class Collective(NamedTuple):
    """A collective of a program, and the compute that runs while it is in progress.

    All numbers are of one device. `bytes` and `wire_bytes` are of one execution, and
    `operations`, `matmuls`, `flops` and `share` of all executions together.

    Attributes:
      name: Name of the HLO instruction that starts the collective. If one instruction
        starts several collectives, the name is `"instruction/collective"`.
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`,
        `"ragged-all-to-all"`, `"collective-permute"`, `"collective-broadcast"`,
        `"collective-reduce"`, `"send"` or `"recv"`.
      dtypes: HLO dtypes of the arrays that the collective moves, such as `"f32"`.
      group_size: Number of devices p that exchange data, in the largest group.
      bytes: Size n of the arrays that one device contributes, in bytes. For a ragged
        all-to-all it is the size of the whole input array, of which a device may send
        only a part. For a `"recv"` it is the size of the array that arrives.
      wire_bytes: Least number of bytes that one device must send, whichever algorithm
        is used: `2 (p-1)/p n` for an all-reduce, `(p-1)/p n` for a reduce-scatter or an
        all-to-all, `(p-1) n` for an all-gather, 0 for a `"recv"`, and `n` for the other
        kinds. It is 0 if p is 1.
      asynchronous: Whether the start and the end of the collective are separate, so
        that other instructions may run in between.
      operations: Number of kernels that run while the collective is in progress.
      matmuls: Number of matmuls and convolutions that run in this time.
      flops: FLOPs of these matmuls and convolutions.
      share: `flops` divided by the FLOPs of the whole program; 0 for a program without
        FLOPs.
      times: Number of executions: the product of the trip counts of the loops around
        the collective.
      op_name: JAX operation that the collective comes from, such as `"jit(step)/psum"`;
        empty if the program does not name it.
      axes: Mesh axes along which the devices of a group differ, such as `("host",)`.
        `None` if `inspect` does not know the mesh.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    group_size: int
    bytes: float
    wire_bytes: float
    asynchronous: bool
    operations: int
    matmuls: int
    flops: float
    share: float
    times: int
    op_name: str
    axes: tuple[str, ...] | None = None


class Item(NamedTuple):
    """A kernel, loop or collective of the schedule, as `timeline` draws it."""

    name: str
    kind: str  # "matmul" if it has one, the kind of a collective, or "other"
    flops: float  # of all executions; 0 for a collective
    start: int  # compute items in the schedule before it starts
    end: int  # compute items in the schedule before it ends


class Report(NamedTuple):
    """The compute of a program that runs while its collectives are in progress.

    A report describes a schedule and contains no times. Only `measure` shows whether
    the compute lasts long enough to hide the collectives. `print(report)` prints a
    table with one row for each collective.

    Attributes:
      program: Name of the HLO module.
      flops: FLOPs of the program's matmuls and convolutions, on one device.
      matmuls: Number of matmuls and convolutions that one device runs.
      operations: Number of kernels that one device runs, without collectives and
        asynchronous copies.
      collectives: A `Collective` for each collective, in the order of the schedule.
      covered: Share of `flops` that runs while at least one collective is in progress,
        from 0 to 1; `None` for a program without FLOPs. The smallest collectives, which
        together send less than a hundredth of all bytes, do not count.
      uncounted: Instructions whose FLOPs are missing from `flops`, or counted once
        although they may run several times, each with the reason.
      schedule: Compute and collectives in the order of the schedule, for `timeline`. A
        loop without collectives is one item, a loop with collectives is drawn as one
        iteration, and a conditional with collectives as its largest branch.
      covered_by: The same share for the collectives over given mesh axes, by the names
        of the axes; empty for a program without FLOPs, or if the mesh is not known. A
        hundredth is then that of the bytes over these axes.
      memory: Memory that the program needs on one device. `None` if `inspect` was given
        HLO text, which does not contain it, or if the backend does not report it.

    Examples:
      An all-reduce over eight devices with one matmul between its start and its end:

      >>> from pipejax.overlap import inspect
      >>> report = inspect('''HloModule step, is_scheduled=true, replica_count=8
      ... ENTRY %main (p: f32[8,8], x: f32[100]) -> f32[100] {
      ...   %p = f32[8,8] parameter(0)
      ...   %x = f32[100] parameter(1)
      ...   %start = f32[100] all-reduce-start(%x), replica_groups={}
      ...   %matmul = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}
      ...   ROOT %done = f32[100] all-reduce-done(%start)
      ... }''')
      >>> report.covered, report.share, report.collectives[0].wire_bytes
      (1.0, 1.0, 700.0)
    """

    program: str
    flops: float
    matmuls: int
    operations: int
    collectives: tuple[Collective, ...]
    covered: float | None
    uncounted: tuple[str, ...]
    schedule: tuple[Item, ...]
    covered_by: dict[tuple[str, ...], float] = {}  # noqa: RUF012 - never changed
    memory: Memory | None = None

    @property
    def share(self) -> float | None:
        r"""Returns the mean share of the collectives, weighted by the bytes they send.

        $$share = \sum_c b_c s_c / \sum_c b_c$$

        Here `b_c` is `times * wire_bytes` of collective c, and `s_c` is its `share`.
        The mean is `None` if nothing is sent or the program has no FLOPs.

        `covered` counts each FLOP once, however many collectives are in progress. If
        two equal collectives follow each other and each spans half of the FLOPs,
        `covered` is 1 and `share` is 0.5.
        """
        return self._share_of(self.collectives)

    @property
    def share_by(self) -> dict[tuple[str, ...], float | None]:
        """Returns the same mean over the collectives that run over given mesh axes."""
        axes = dict.fromkeys(c.axes for c in self.collectives if c.axes is not None)
        return {
            names: self._share_of([c for c in self.collectives if c.axes == names])
            for names in axes
        }

    def _share_of(self, collectives: Sequence[Collective]) -> float | None:
        weights = [c.times * c.wire_bytes for c in collectives]
        if not sum(weights) or not self.flops:
            return None
        shares = [c.share for c in collectives]
        return sum(map(float.__mul__, weights, shares)) / sum(weights)

    @property
    def summary(self) -> str:
        """Returns a line with `covered`, `share`, collectives and live memory."""
        hidden = sum(c.asynchronous for c in self.collectives)
        count = len(self.collectives)
        live = "" if self.memory is None else f", live {amount(self.memory.live)}B"
        return (
            f"covered {two_digits(self.covered)}, share {two_digits(self.share)},"
            f" collectives {count}: {count - hidden} sync, {hidden} async{live}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything but the schedule, as a dict that `json.dumps` takes."""
        return {
            "program": self.program,
            "flops": self.flops,
            "matmuls": self.matmuls,
            "operations": self.operations,
            "share": self.share,
            "covered": self.covered,
            "covered_by": {"+".join(k): v for k, v in self.covered_by.items()},
            "share_by": {"+".join(k): v for k, v in self.share_by.items()},
            "uncounted": list(self.uncounted),
            "collectives": [c._asdict() for c in self.collectives],
            "memory": None if self.memory is None else self.memory.to_dict(),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.program}: {amount(self.flops)}FLOP in matmuls and convolutions"
            f" ({self.matmuls}), kernels ({self.operations}), collectives"
            f" ({len(self.collectives)})"
        ]
        lines += [f"not counted: {what}" for what in self.uncounted]
        if self.memory is not None:
            parts = self.memory.to_dict().items()
            lines += ["memory: " + ", ".join(f"{k} {amount(v)}B" for k, v in parts)]
        if not self.collectives:
            return "\n".join([*lines, "", _NONE])
        why = "nothing is sent" if self.flops else "it has no matmul"
        share = f"none, {why}" if self.share is None else f"{self.share:.2f}"
        return "\n".join(
            [
                *lines,
                "",
                *_table(self.collectives),
                "",
                "share of FLOPs under at least one collective:"
                f" {two_digits(self.covered)}",
                f"share of FLOPs under communication, weighted by bytes: {share}",
                *self._lines_by_axis(),
            ]
        )

    def _lines_by_axis(self) -> list[str]:
        """Returns the two shares for each set of axes, if there is more than one."""
        shares = self.share_by
        if len(shares) < 2:
            return []
        return [
            f"over {_joined(axes)}: under at least one"
            f" {two_digits(self.covered_by.get(axes))}, weighted by bytes"
            f" {two_digits(share)}"
            for axes, share in shares.items()
        ]


# The columns of the table: how they are aligned, and what they say.
_COLUMNS: dict[str, tuple[str, Callable[[Collective], object]]] = {
    "collective": ("<", lambda c: c.kind),
    "dtype": ("<", lambda c: "+".join(c.dtypes)),
    "devices": (">", lambda c: c.group_size),
    "over": ("<", lambda c: _joined(c.axes)),
    "payload": (">", lambda c: f"{amount(c.bytes)}B"),
    "sent": (">", lambda c: f"{amount(c.wire_bytes)}B"),
    "times": (">", lambda c: c.times),
    "mode": ("<", lambda c: "async" if c.asynchronous else "SYNC"),
    "operations": (">", lambda c: c.operations),
    "matmuls": (">", lambda c: c.matmuls),
    "share": (">", lambda c: f"{c.share:.2f}"),
    "from": (
        "<",
        lambda c: c.op_name if len(c.op_name) <= 40 else f"...{c.op_name[-37:]}",
    ),
}


def _table(collectives: Sequence[Collective]) -> list[str]:
    columns = []
    for title, (side, says) in _COLUMNS.items():
        cells = [title, *(str(says(c)) for c in collectives)]
        width = max(map(len, cells))
        columns.append([f"{cell:{side}{width}}" for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _joined(axes: tuple[str, ...] | None) -> str:
    return "?" if axes is None else "+".join(axes) or "none"


def two_digits(share: float | None) -> str:
    return "none" if share is None else f"{share:.2f}"


def amount(number: float) -> str:
    """Returns a number with three digits and a unit prefix: k, M, G or T.

    Args:
      number: The number, at least 0.

    Examples:
      >>> amount(1_080_000.0)
      '1.08 M'
    """
    for prefix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} T"
