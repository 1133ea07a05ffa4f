"""Step times with local steps, which exchange parameters once in a round."""

from collections.abc import Sequence

from pipejax._internal.round_schedule import steps_that_hide, whole_steps

from ._iteration import Compute
from ._plan import ranked
from ._train_config import RankedConfig

FACTORS = (1, 4, 16)
"""The rounds that are considered, as multiples of the steps that hide an exchange."""


def local_steps(
    choices: Sequence[RankedConfig], compute: Compute, *, one_core: bool = False
) -> list[RankedConfig]:
    r"""Returns ways to train with local steps, the shortest step first.

    Let c be the compute time, x the time to exchange all parameters at once, and l the
    part of x that does not depend on the number of bytes, which every chunk takes. An
    exchange in n chunks is hidden behind

    $$n = \lceil (x - l) / (c - l) \rceil$$

    steps, if l is below c; otherwise nothing hides it. Each way of one bucket is
    considered with rounds of n steps that hide their exchange, and with rounds of m, 4m
    and 16m steps that wait for it, where m is `x / c`, rounded up. Step times are those
    of `local_step_time`.

    Args:
      choices: Ways to train, as `plan` returns them.
      compute: The compute times of a step that `plan` was given.
      one_core: As `plan` was given.

    Returns:
      The ways. If step times differ by at most 1 %, the shorter round comes first, and
      then the order is that of `plan`.

    Raises:
      ValueError: If the compute takes no time.

    Examples:
      Parameters of 16 MB on links of 10 Mbit/s, with 0.25 s of compute:

      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 1.25e6))
      >>> compute = pj.timing.Compute.of(0.25)
      >>> ranked = pj.timing.plan(cluster, 4_000_000, compute)
      >>> found = pj.timing.local_steps(ranked, compute)
      >>> print(found[0].config)
      H = 77, V = 77, halving_doubling, uncompressed
      >>> f"{found[0].ratio:.2f}, {ranked[0].ratio:.2f} without local steps"
      '1.00, 77.30 without local steps'
    """
    if not compute.total:
        raise ValueError(
            "`compute` must take time, which hides an exchange; got 0 seconds. Give the"
            " times of a step."
        )
    found = []
    for choice in choices:
        if choice.config.width > 1 or choice.config.buckets > 1:
            continue
        total, fixed = choice.exchange.total, choice.exchange.fixed
        steps = whole_steps(total / compute.total)
        rounds = [(factor * steps, 0) for factor in FACTORS]
        if hidden := steps_that_hide(compute.total, total, fixed):
            rounds = [(hidden, hidden), *rounds]
        for every, overlap in rounds:
            config = choice.config._replace(sync_every=every, overlap_steps=overlap)
            step = config.step(compute, choice.exchange, one_core=one_core)
            found.append(choice._replace(config=config, step=step))
    return ranked(found)
