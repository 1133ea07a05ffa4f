"""Ways to train with a sharded optimizer, whose update runs between two halves."""

from collections.abc import Sequence

from pipejax._internal.integers import is_integer

from ._hiding import batch_to_hide
from ._iteration import Compute
from ._plan import ranked
from ._train_config import RankedConfig, TrainConfig, of_halves


def shard_optimizer(
    choices: Sequence[RankedConfig],
    compute: Compute,
    devices: int,
    *,
    one_core: bool = False,
) -> list[RankedConfig]:
    r"""Returns the ways that can shard the optimizer, with the step times if they do.

    With u the seconds of the update of all parameters and p devices, each device
    updates for u / p. At width 2, a step takes `sharded_step_time`, which hides an
    exchange that takes x seconds if

    $$x \le 2 \min(f, b)$$

    with f and b the seconds of forward and backward pass. A codec encodes gradients,
    and so the first half alone: x is the mean of the exchange with it and of that
    without. With a delay, the second half is a quarter longer, because slopes of 8 bits
    travel beside parameters of 32, as under AdamW.

    Args:
      choices: All ways to train that `plan` returns.
      compute: The compute times f, b and u of a step that `plan` was given.
      devices: The number p of devices over which the optimizer is sharded.
      one_core: As `plan` was given. The host executor, which CPUs have, then runs the
        step, which takes `pipelined_step_time`.

    Returns:
      The ways with one bucket whose algorithm has two halves on p devices, ranked as
      `plan` ranks them.

    Raises:
      ValueError: If `devices` is not a whole number above 0, or if `choices` hold a
        way with a codec, and not the same one without.

    Examples:
      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 125e6))
      >>> compute = pj.timing.Compute(0.2, 0.4, update=0.08)
      >>> ranked = pj.timing.plan(cluster, 4_000_000, compute)
      >>> found = pj.timing.shard_optimizer(ranked, compute, 4)
      >>> f"{found[0].config}: {found[0].step:.2f} s"
      'width 2, halving_doubling, uncompressed: 0.64 s'

    References:
      Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054
    """
    if not is_integer(devices, 1):
        raise ValueError(
            f"`devices` must be a whole number above 0, got {devices!r}. Give the"
            " number of devices that share the optimizer."
        )
    own, found = compute.sharded(devices), []
    exact = {x.config: x.exchange for x in choices if x.config.codec is None}
    for choice in choices:
        if not _has_halves(choice.config, devices):
            continue
        config = choice.config._replace(shard_optimizer=True)
        second = exact.get(choice.config._replace(codec=None))
        if second is None:
            raise ValueError(
                "`choices` must hold each way with a codec also without it, because a"
                f" codec encodes one half of the exchange alone; got {choice.config}."
                " Give all ways that `plan` returns."
            )
        exchange = of_halves(choice.exchange, second, slopes=config.width > 1)
        slack = None
        if config.width > 1 and not one_core:
            slack = 1 - batch_to_hide(own, exchange, shard_optimizer=True)
        step = config.step(own, exchange, one_core=one_core)
        found.append(
            choice._replace(
                config=config,
                exchange=exchange,
                step=step,
                compute=own.total,
                slack=slack,
            )
        )
    return ranked(found)


def _has_halves(config: TrainConfig, devices: int) -> bool:
    """Returns whether every device has a piece of the sums between two halves."""
    if config.levels or config.buckets > 1:
        return False
    if config.algorithm == "psum":
        return config.codec is None
    if config.algorithm == "halving_doubling":
        return devices & (devices - 1) == 0
    return config.algorithm in ("two_shot", "ring")
