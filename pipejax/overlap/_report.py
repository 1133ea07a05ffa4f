"""What an inspection says: numbers and a table."""

from typing import Any, NamedTuple

from ._memory import Memory

_NONE = """\
no collectives: there is no communication to hide. Perhaps the program runs on one
device (JAX_NUM_CPU_DEVICES=8 in the environment makes eight of a CPU); or it was
compiled without a mesh (jit alone, no shard_map or shardings); or XLA removed
collectives whose result nobody uses; or the all-reduce is a program of its own, as the
host executor has it."""


class Collective(NamedTuple):
    """One collective of a program, and what runs while it is under way.

    Sizes are of one execution on one device; what it hides is of all `times` together.

    Attributes:
      name: of the instruction that begins it, and its own where several begin together.
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`,
        `"ragged-all-to-all"`, `"collective-permute"`, `"collective-broadcast"`,
        `"collective-reduce"`, `"send"` or `"recv"`.
      dtypes: of what travels.
      group_size: devices p that exchange with each other, of the largest group.
      bytes: n, what a device hands over; of a ragged all-to-all its whole array.
      wire_bytes: what a device must send, whatever the algorithm; see `wire_bytes`.
      asynchronous: whether others may run while it is under way.
      operations: kernels under it.
      matmuls: matmuls and convolutions under it.
      flops: theirs.
      share: `flops` over the program's; 0 for a program that has none.
      times: how often it runs: the product of the loops around it.
      op_name: the JAX operation that it comes from.
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


class Item(NamedTuple):
    """One thing in the schedule, for a picture of it.

    Attributes:
      name: of the instruction.
      kind: `"matmul"` (or convolution), `"other"`, or a collective's kind.
      flops: of all its executions.
      start: number of compute items before it.
      end: number of compute items before its end.
    """

    name: str
    kind: str
    flops: float
    start: int
    end: int


class Report(NamedTuple):
    """How much of a program's compute runs while its collectives are under way.

    A property of the schedule, not a time: the FLOPs are there to hide behind, whether
    they last long enough is for a measurement to say.

    Attributes:
      program: the module's name.
      flops: of its matmuls and convolutions, on one device.
      matmuls: how many run.
      collectives: in the order of the schedule.
      covered: share of the FLOPs that run under at least one collective; `None` without
        FLOPs.
      uncounted: what is not in `flops`, and why.
      schedule: compute and collectives, for `timeline`; loops without collectives are
        one item, others are drawn as one iteration.
      memory: what the program needs; `None` for text, which does not say.
    """

    program: str
    flops: float
    matmuls: int
    collectives: tuple[Collective, ...]
    covered: float | None
    uncounted: tuple[str, ...]
    schedule: tuple[Item, ...]
    memory: Memory | None = None

    @property
    def share(self) -> float | None:
        """`sum_c b_c share_c / sum_c b_c`, `b` what a device sends; `None` without any.

        1 when every collective has all FLOPs beside it, 0 when all are synchronous.
        """
        weights = [c.times * c.wire_bytes for c in self.collectives]
        if not sum(weights) or not self.flops:
            return None
        shares = [c.share for c in self.collectives]
        return sum(map(float.__mul__, weights, shares)) / sum(weights)

    @property
    def summary(self) -> str:
        """One line: what is covered, how many collectives wait, live memory."""
        hidden = sum(c.asynchronous for c in self.collectives)
        count = len(self.collectives)
        live = "" if self.memory is None else f", live {amount(self.memory.live)}B"
        return (
            f"covered {two_digits(self.covered)}, share {two_digits(self.share)},"
            f" collectives {count}: {count - hidden} sync, {hidden} async{live}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All but the schedule, in types that JSON has."""
        collectives = [
            {**c._asdict(), "dtypes": list(c.dtypes)} for c in self.collectives
        ]
        return {
            "program": self.program,
            "flops": self.flops,
            "matmuls": self.matmuls,
            "share": self.share,
            "covered": self.covered,
            "uncounted": list(self.uncounted),
            "collectives": collectives,
            "memory": None if self.memory is None else self.memory.to_dict(),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.program}: {amount(self.flops)}FLOP in matmuls and convolutions"
            f" ({self.matmuls}), collectives ({len(self.collectives)})"
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
                *_table([_row(c) for c in self.collectives]),
                "",
                "share of FLOPs under at least one collective:"
                f" {two_digits(self.covered)}",
                f"share of FLOPs under communication, weighted by bytes: {share}",
            ]
        )


_HEAD = (
    "collective",
    "dtype",
    "devices",
    "payload",
    "sent",
    "times",
    "mode",
    "operations",
    "matmuls",
    "share",
    "from",
)


def _row(c: Collective) -> tuple[str, ...]:
    return (
        c.kind,
        "+".join(c.dtypes),
        str(c.group_size),
        f"{amount(c.bytes)}B",
        f"{amount(c.wire_bytes)}B",
        str(c.times),
        "async" if c.asynchronous else "SYNC",
        str(c.operations),
        str(c.matmuls),
        f"{c.share:.2f}",
        c.op_name if len(c.op_name) <= 40 else f"...{c.op_name[-37:]}",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns of words to the left, of numbers to the right."""
    left = {"collective", "dtype", "mode", "from"}
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(_HEAD, row, widths, strict=True)
        ).rstrip()
        for row in (_HEAD, *rows)
    ]


def two_digits(share: float | None) -> str:
    """A share; `none` where there is none."""
    return "none" if share is None else f"{share:.2f}"


def amount(number: float) -> str:
    """With a prefix: `1.08 M`."""
    for prefix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} T"
