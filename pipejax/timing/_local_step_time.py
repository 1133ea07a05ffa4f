"""The time of a local step in closed form."""

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

    With c the compute time and x the time to exchange all parameters, V steps hide the
    exchange of a round, and the other steps compute alone:

    $$t = (\max(V c, x) + (H - V) c) / H$$

    Args:
      compute: The compute times of a step; c is `compute.total`.
      exchange: The exchange of all parameters; x is `exchange.total`.
      sync_every: The number H of steps of a round.
      overlap_steps: The number V of steps that hide an exchange, at most H.
      one_core: Whether the codec and the additions run on the core that computes the
        model, as on a CPU. They then also count as compute: `exchange.computed` is
        added to `V c`.

    Raises:
      ValueError: If H is not an integer of at least 1, or V not one from 0 to H.

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
    RoundSchedule(sync_every, overlap_steps)  # which checks both
    also = exchange.computed if one_core and overlap_steps else 0.0
    beside = max(overlap_steps * compute.total + also, exchange.total)
    return (beside + (sync_every - overlap_steps) * compute.total) / sync_every
