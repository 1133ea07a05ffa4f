"""Step times with a sharded optimizer, whose update runs between two halves."""

from collections.abc import Sequence

from ._iteration import Compute, synchronous_step_time
from ._train_config import RankedConfig

# Algorithms between whose halves every device has a piece of the sums.
HALVES = ("psum", "two_shot", "ring", "halving_doubling")


def shard_optimizer(
    choices: Sequence[RankedConfig], compute: Compute, devices: int
) -> list[RankedConfig]:
    r"""Returns the ways that can shard the optimizer, with the step times if they do.

    At width 2, the reduce-scatter runs beside the forward pass, and the all-gather
    beside the backward pass. With f, b and u the seconds of forward pass, backward pass
    and update, x the exchange time, and p devices, each of which updates its share,

    $$t = \max(f, x / 2) + \max(b, x / 2) + u / p$$

    This is the step of the fused executor. With the host executor, a step takes
    `pj.timing.pipelined_step_time`.

    Args:
      choices: Ways to train, as `plan` returns them.
      compute: The compute times f, b and u that `plan` was given.
      devices: The number p of devices over which the optimizer is sharded.

    Returns:
      The ways with one bucket whose algorithm has two halves, the shortest step first.

    Examples:
      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 125e6))
      >>> compute = pj.timing.Compute(0.2, 0.4, update=0.08)
      >>> ranked = pj.timing.plan(cluster, 4_000_000, compute)
      >>> found = pj.timing.shard_optimizer(ranked, compute, 4)
      >>> f"{found[0].config}: {found[0].step:.2f} s"
      'width 2, halving_doubling, uncompressed: 0.62 s'

    References:
      Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054
    """
    forward, backward = compute.forward, compute.backward
    update = compute.update / devices
    found = []
    for choice in choices:
        config, half = choice.config, choice.exchange.total / 2
        if config.algorithm not in HALVES or config.levels or config.buckets > 1:
            continue
        if config.algorithm == "psum" and config.codec is not None:
            continue
        if config.width == 1:
            own = Compute(forward, backward, update)
            step = synchronous_step_time(own, choice.exchange)
        else:
            step = max(forward, half) + max(backward, half) + update
        found.append(choice._replace(step=step))
    return sorted(found, key=lambda choice: choice.step)
