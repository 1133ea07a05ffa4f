"""The time of a local step in closed form."""

from pipejax._core.checks import check_flag
from pipejax._internal.round_schedule import RoundSchedule

from ._exchange import Duration
from ._iteration import Compute


def local_step_time(
    compute: Compute,
    exchange: Duration,
    sync_every: int,
    overlap_steps: int,
    *,
    one_core: bool = False,
) -> float:
    r"""Returns the seconds of a local step, as a mean over a round of H steps.

    Let c be the compute time, x the time to exchange all parameters at once, and l the
    part of x that does not depend on the number of bytes. V steps hide the exchange of
    a round, in V chunks, each of which takes l and its share of the rest. The other
    steps compute alone:

    $$t = (\max(V c, x + (V - 1) l) + (H - V) c) / H$$

    Args:
      compute: The compute times of a step; c is `compute.total`.
      exchange: The exchange of all parameters; x is `exchange.total`, and l is
        `exchange.fixed`.
      sync_every: The number H of steps of a round.
      overlap_steps: The number V of steps that hide an exchange, at most H.
      one_core: Whether the codec and the additions run on the core that computes the
        model, as on a CPU. They then also count as compute: `exchange.computed` is
        added to `V c`.

    Raises:
      ValueError: If H is not an integer of at least 1, V not one from 0 to H, or
        `one_core` not a bool.

    References:
      Douillard et al., Streaming DiLoCo, 2025, https://arxiv.org/abs/2501.18512

    Examples:
      An exchange that takes as long as ten steps costs nothing if ten steps hide it:

      >>> import pipejax as pj
      >>> compute = pj.timing.Compute.of(1.0)
      >>> exchange = pj.timing.Duration(0, 10.0, 0, 0, 0)  # 10 s on the wire
      >>> [pj.timing.local_step_time(compute, exchange, 10, v) for v in (0, 5, 10)]
      [2.0, 1.5, 1.0]
    """
    check_flag("one_core", one_core)
    RoundSchedule(sync_every, overlap_steps)  # which checks both
    also = exchange.computed if one_core and overlap_steps else 0.0
    chunks = exchange.total + max(0, overlap_steps - 1) * exchange.fixed
    beside = max(overlap_steps * compute.total + also, chunks)
    return (beside + (sync_every - overlap_steps) * compute.total) / sync_every
