"""Simulation of a cluster with varying times, shared links or unequal devices.

Exchanges are simulated message by message. A message leaves when its sender has it
ready and the links of sender and receiver are free. It occupies both links for the
seconds that its bytes take.

Steps follow the dependencies of Pipe-SGD at width K:

- Step t starts when step t-1 has been computed and the gradient of step t-K has been
  exchanged.
- The exchange of step t starts when step t has been computed and the exchange of step
  t-1 is over.

With local steps, devices exchange parameters once in a round of H steps, in V chunks:

- V of the steps have a chunk beside them, which is exchanged from the start of the
  step. The step is over when it has been computed and the chunk has arrived.
- If V is 0, the exchange follows the last step of a round.

The simulation works on arrays over all devices, so that thousands of devices take
seconds.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from pipejax._internal.integers import is_integer
from pipejax._internal.round_schedule import RoundSchedule

from ._cluster import Cluster, CodecSpeed
from ._counts import counted
from ._rounds import ROUNDS, Round, Work
from ._workload import Workload


@dataclasses.dataclass(frozen=True)
class Trace:
    """The times at which each device finishes each step, in seconds from the start.

    Attributes:
      computed: [steps, devices], when the device has computed the step's gradient.
      exchanged: [steps, devices], when the device has the sum of the step's gradients.
      sync_every: The number H of steps of a round, 1 without local steps.
    """

    computed: np.ndarray
    exchanged: np.ndarray
    sync_every: int = 1

    @property
    def step_time(self) -> float:
        """The seconds per step at the slowest device, in the second half of the rounds.

        The first half is left out, because its first steps fill the pipeline.
        """
        # When the last device has finished each round.
        last = slice(self.sync_every - 1, None, self.sync_every)
        ends = self.exchanged[last].max(axis=1)
        half = len(ends) // 2
        rounds = len(ends) - half
        return float((ends[-1] - ends[half - 1]) / (rounds * self.sync_every))


def simulate(
    cluster: Cluster,
    workload: Workload,
    width: int,
    steps: int | None = None,
    seed: int = 0,
    *,
    sync_every: int = 0,
    overlap_steps: int = 0,
) -> Trace:
    """Simulates steps of Pipe-SGD at width K, or local steps, message by message.

    Where all hosts are alike, have one device each, and times do not vary, the step
    time agrees with `pipelined_step_time` and `local_step_time`, with two exceptions:

    - The server of `parameter_server` receives the next gradients while it still sends
      a sum, because links carry both directions at once. The formulas add up both.
    - In a `tree` of p devices, where p is not a power of two, some devices wait for
      fewer messages than the formulas count.

    Use this function for stragglers, jitter, and links that several devices share. The
    simulation has no weight prediction.

    Args:
      cluster: The cluster with its hosts, links and speeds.
      workload: The work of a step.
      width: The width K. Width 1 is synchronous.
      steps: The number of steps, at least 2, or two rounds of local steps. `None`
        stands for 20, or for four rounds if they are longer.
      seed: The seed of the jitter.
      sync_every: The number H of local steps of a round. 0 stands for no local steps.
      overlap_steps: The number V of steps that hide the exchange of a round, at most H.

    Returns:
      When each device has computed and exchanged each step. A local step is exchanged
      when the chunk beside it has arrived.

    Raises:
      ValueError: If `steps` or `width` is too small, local steps have a width above 1
        or more than H steps of overlap, `workload.slow` does not have one number for
        each device, `workload.algorithm` is not a key of `pj.timing.COST_MODELS`, or
        `workload.speed` is not a key of `cluster.codecs`.

    Examples:
      A device that is three times as slow as the others sets the step time:

      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 125e6))
      >>> work = pj.timing.Workload(0.25, 10**5, "ring", slow=(1, 1, 3, 1))
      >>> f"{pj.timing.simulate(cluster, work, width=2).step_time:.2f} s"
      '0.75 s'
    """
    schedule = None
    if sync_every or overlap_steps:
        schedule = RoundSchedule(sync_every, overlap_steps)
    least = 2 * schedule.sync_every if schedule else 2
    if steps is None:
        steps = max(20, 2 * least)
    if not (is_integer(steps, least) and is_integer(width, 1)):
        raise ValueError(
            f"`steps` must be a whole number of at least {least} and `width` at least"
            f" 1, got {steps}, {width}."
        )
    if schedule and width > 1:
        raise ValueError(
            "`width` must be 1 with local steps, which do not delay gradients; got"
            f" {width}. Leave out `sync_every` for Pipe-SGD."
        )
    p = cluster.hosts * cluster.devices
    times = workload.compute_times(steps, p, np.random.default_rng(seed))
    if schedule:
        return _local_steps(cluster, workload, times, schedule)
    exchange = _exchange(cluster, workload, workload.elements)
    computed, exchanged = np.zeros((steps, p)), np.zeros((steps, p))
    zero = np.zeros(p)
    for t in range(steps):
        before = computed[t - 1] if t else zero
        # The two rules of the steps, at the top of this module, are the next three
        # lines.
        applied = exchanged[t - width] if t >= width else zero
        computed[t] = np.maximum(before, applied) + times[t]
        ready = np.maximum(computed[t], exchanged[t - 1] if t else zero)
        exchanged[t] = exchange(ready)
    return Trace(computed, exchanged)


def _local_steps(
    cluster: Cluster, workload: Workload, times: np.ndarray, schedule: RoundSchedule
) -> Trace:
    """Simulates local steps with these compute times, [steps, devices]."""
    exchange = _exchange(cluster, workload, -(-workload.elements // schedule.chunks))
    computed, ends = np.zeros_like(times), np.zeros_like(times)
    for t, seconds in enumerate(times):
        start = ends[t - 1] if t else np.zeros_like(seconds)
        computed[t] = ends[t] = start + seconds
        if schedule.chunk_at(t) is not None:
            ends[t] = np.maximum(computed[t], exchange(start))
        elif not schedule.overlap_steps and (t + 1) % schedule.sync_every == 0:
            ends[t] = exchange(computed[t])
    return Trace(computed, ends, schedule.sync_every)


def _exchange(
    cluster: Cluster, workload: Workload, elements: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function of when each device is ready, which returns when it is done.

    Its calls are exchanges of vectors of so many elements, one after another.
    """
    p = cluster.hosts * cluster.devices
    shape = workload.algorithm, p, elements, workload.codec
    launched = counted(*shape).collectives * cluster.synchronisation
    rounds = list(ROUNDS[workload.algorithm](*shape[1:]))
    network = Network(cluster, cluster.codec(workload.speed))
    return lambda ready: network.exchange(rounds, ready + launched)


class Network:
    """The links of a cluster, and the time until which each of them is occupied."""

    def __init__(self, cluster: Cluster, speed: CodecSpeed) -> None:
        self._cluster, self._speed = cluster, speed
        self._host = np.repeat(np.arange(cluster.hosts), cluster.devices)
        self._out = np.zeros(cluster.hosts)
        self._in = np.zeros(cluster.hosts)

    def exchange(self, rounds: Iterable[Round], ready: np.ndarray) -> np.ndarray:
        """Returns when each device is done with the rounds, if it begins at `ready`."""
        times = ready.copy()
        for each in rounds:
            before, after = self._seconds(each.before), self._seconds(each.after)
            for i in range(each.repeat):
                senders, receivers = each.pairs(i)
                times[senders] += before
                if receivers.size:
                    arrived = self._deliver(each, senders, receivers, times[senders])
                    times[receivers] = np.maximum(times[receivers], arrived) + after
        return times

    def _seconds(self, work: Work) -> float:
        return (
            work.encoded / self._speed.encode
            + work.decoded / self._speed.decode
            + work.summed / self._cluster.reduction
        )

    def _deliver(
        self,
        each: Round,
        senders: np.ndarray,
        receivers: np.ndarray,
        ready: np.ndarray,
    ) -> np.ndarray:
        """Returns when each message of a round arrives, if it is there at `ready`."""
        link, inner = self._cluster.link, self._cluster.inner
        sources, targets = self._host[senders], self._host[receivers]
        share = getattr(self._cluster.shares, each.pattern, 1.0)
        wire = each.payload / link.bandwidth / share
        arrived = np.empty_like(ready)
        if inner is not None:
            # Inside a host, each pair of devices has a link of its own, which is always
            # free.
            arrived[:] = ready + inner.latency + each.payload / inner.bandwidth / share
        where = np.flatnonzero(sources != targets)
        if self._cluster.devices == 1:
            # A device sends and receives at most one message in a round. With one
            # device a host, no link is asked for twice, and all messages can be
            # computed at once.
            source, target = sources[where], targets[where]
            begin = np.maximum(self._out[source], self._in[target])
            done = np.maximum(begin, ready[where]) + wire
            self._out[source] = self._in[target] = done
            arrived[where] = done + link.latency
            return arrived
        # The devices of a host share its link. It serves messages in the order in which
        # they are ready, and each one can delay those after it.
        for i in where[np.argsort(ready[where], kind="stable")]:
            source, target = sources[i], targets[i]
            done = max(ready[i], self._out[source], self._in[target]) + wire
            self._out[source] = self._in[target] = done
            arrived[i] = done + link.latency
        return arrived
