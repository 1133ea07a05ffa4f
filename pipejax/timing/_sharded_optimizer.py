"""Step times with a sharded optimizer, whose update runs between two halves."""

from collections.abc import Sequence

from ._exchange import Duration
from ._iteration import Compute, bucketed_step_time
from ._way import Choice

# Algorithms between whose halves every device has a piece of the sums.
HALVES = ("psum", "two_shot", "ring", "halving_doubling")


def sharded_optimizer_step_time(
    compute: Compute, exchange: Duration, devices: int
) -> float:
    r"""Returns the seconds of a pipelined step whose optimizer is sharded.

    At width 2, the reduce-scatter runs beside the forward pass, and the all-gather
    beside the backward pass. With f, b and u the seconds of forward pass, backward pass
    and update, x the exchange time, and p devices, each of which updates its share,

    $$t = \max(f, x / 2) + \max(b, x / 2) + u / p$$

    This is the step of the fused executor. With the host executor, a step takes
    `pj.timing.pipelined_step_time`.

    Args:
      compute: The compute times f, b and u of a step.
      exchange: The exchange of a gradient; x is `exchange.total`.
      devices: The number of devices p.

    Returns:
      The seconds of a step.

    References:
      Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054

    Examples:
      >>> import pipejax as pj
      >>> exchange = pj.timing.Duration(0, 1.0, 0, 0, 0)  # 1 s on the wire
      >>> compute = pj.timing.Compute(0.25, 0.5, update=0.25)
      >>> pj.timing.sharded_optimizer_step_time(compute, exchange, 4)
      1.0625
    """
    half = exchange.total / 2
    hidden = max(compute.forward, half) + max(compute.backward, half)
    return hidden + compute.update / devices


def shard_optimizer(
    choices: Sequence[Choice], compute: Compute, devices: int
) -> list[Choice]:
    """Returns the ways that can shard the optimizer, with the step times if they do.

    Args:
      choices: Ways to train, as `plan` returns them.
      compute: The compute times that `plan` was given.
      devices: The number of devices over which the optimizer is sharded.

    Returns:
      The ways with one bucket whose algorithm has two halves, the shortest step first.

    Examples:
      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 125e6))
      >>> compute = pj.timing.Compute(0.2, 0.4, update=0.08)
      >>> ranked = pj.timing.plan(cluster, 4_000_000, compute)
      >>> found = pj.timing.shard_optimizer(ranked, compute, 4)
      >>> f"{found[0].way}: {found[0].step:.2f} s"
      'width 2, halving_doubling, all bits: 0.62 s'

    References:
      Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054
    """
    found = []
    for choice in choices:
        way = choice.way
        if way.algorithm not in HALVES or way.levels or way.buckets > 1:
            continue
        if way.algorithm == "psum" and way.codec is not None:
            continue
        if way.width == 1:
            own = Compute(compute.forward, compute.backward, compute.update / devices)
            step = bucketed_step_time(own, choice.exchange, 1)
        else:
            step = sharded_optimizer_step_time(compute, choice.exchange, devices)
        found.append(choice._replace(step=step))
    return sorted(found, key=lambda choice: choice.step)
