"""A cluster simulated: where times vary, links are shared, or hosts are not alike.

Exchanges are simulated message by message: one leaves when its sender has it ready and
both links are free, and keeps both for `bytes / bandwidth`. Steps follow the recursion
of Pipe-SGD: with g the gradient of step t,

- step t starts when step t-1 is computed and the sum of step t-K is there
- its exchange starts when it is computed and the exchange of step t-1 is over

A model of times, not of gradients. All of a run is arrays over the workers, so that
thousands take seconds.
"""

import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np

from pipejax.codecs import Codec

from ._cluster import Cluster
from ._counts import FLOAT32, Algorithm
from ._exchange import flat
from ._rounds import Round, Work, rounds


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every step asks, and how unevenly.

    Attributes:
      seconds: that a device computes in a step.
      elements: of a gradient.
      algorithm: of the all-reduce, over all devices.
      codec: what travels; `None` sends all bits.
      speed: the codec's name in `Cluster.codecs`.
      jitter: of a step's compute time, the standard deviation of its logarithm.
      slow: of each device, how many times as long it computes; `None` is 1 for all.
    """

    seconds: float
    elements: int
    algorithm: Algorithm = "psum"
    codec: Codec | None = None
    speed: str | None = None
    jitter: float = 0.0
    slow: tuple[float, ...] | None = None

    def compute_times(
        self, steps: int, devices: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Seconds [steps, devices]; the mean is `seconds`, whatever the jitter."""
        noise = rng.normal(-(self.jitter**2) / 2, self.jitter, (steps, devices))
        slow = np.ones(devices) if self.slow is None else np.asarray(self.slow)
        if slow.shape != (devices,):
            raise ValueError(
                f"`slow` must have one number for each of {devices} devices, got"
                f" {slow.size}."
            )
        return self.seconds * np.exp(noise) * slow


@dataclasses.dataclass(frozen=True)
class Trace:
    """When what happened, in seconds from the start.

    Attributes:
      computed: the gradient of each step, by device [steps, devices].
      exchanged: its sum is there [steps, devices].
    """

    computed: np.ndarray
    exchanged: np.ndarray

    @property
    def step_time(self) -> float:
        """Seconds a step, over the second half of them, at the device that is last."""
        ends = self.exchanged.max(axis=1)
        half = len(ends) // 2
        return float((ends[-1] - ends[half - 1]) / (len(ends) - half))


def simulate(
    cluster: Cluster, workload: Workload, width: int, steps: int = 20, seed: int = 0
) -> Trace:
    """Steps of Pipe-SGD at width K; 1 is synchronous.

    Args:
      cluster: hosts, links, speeds.
      workload: what a step is.
      width: K.
      steps: at least 2.
      seed: of the jitter.

    Raises:
      ValueError: for fewer than 2 steps, or a workload that does not fit.
    """
    if steps < 2 or width < 1:
        raise ValueError(
            f"`steps` must be at least 2 and `width` at least 1, got {steps}, {width}."
        )
    p = cluster.hosts * cluster.devices
    times = workload.compute_times(steps, p, np.random.default_rng(seed))
    network = Network(cluster)
    work = Work.of(cluster, workload.speed)
    exchange = flat(cluster, workload.algorithm, workload.elements, workload.codec)
    launched = exchange.between.collectives + exchange.inside.collectives
    computed, exchanged = np.zeros((steps, p)), np.zeros((steps, p))
    zero = np.zeros(p)
    for t in range(steps):
        before = computed[t - 1] if t else zero
        applied = exchanged[t - width] if t >= width else zero
        computed[t] = np.maximum(before, applied) + times[t]
        ready = np.maximum(computed[t], exchanged[t - 1] if t else zero)
        todo = rounds(workload.algorithm, p, workload.elements, workload.codec, work)
        exchanged[t] = network.exchange(
            todo, ready + launched * cluster.synchronisation
        )
    return Trace(computed, exchanged)


def simulate_asynchronous(
    cluster: Cluster, workload: Workload, steps: int = 20, seed: int = 0
) -> np.ndarray:
    """PS-Async: when the server, the first host, has applied each gradient, sorted.

    Every worker pulls the parameters, computes, pushes its gradient, `steps` times,
    and waits for nobody; the server's link serves who comes first.
    """
    p, size = cluster.hosts, FLOAT32 * workload.elements
    times = workload.compute_times(steps, p, np.random.default_rng(seed))
    wire = size / cluster.link.bandwidth
    free = {"pull": 0.0, "push": 0.0, "add": 0.0}
    applied = []
    # (when, worker, step, what it is to do)
    events = [(0.0, worker, 0, "pull") for worker in range(p)]
    while events:
        now, worker, step, what = heapq.heappop(events)
        remote = worker != 0
        if what in ("pull", "push") and remote:
            free[what] = max(free[what], now) + wire
            now = free[what] + cluster.link.latency
        if what == "pull":
            heapq.heappush(events, (now + times[step, worker], worker, step, "push"))
        elif what == "push":
            heapq.heappush(events, (now, worker, step, "add"))
        else:
            free["add"] = max(free["add"], now) + size / cluster.reduction
            applied.append(free["add"])
            if step + 1 < steps:
                heapq.heappush(events, (free["add"], worker, step + 1, "pull"))
    return np.sort(applied)


class Network:
    """The links of a cluster, and until when each is taken.

    Those of hosts, shared by their devices; inside a host every pair has its own.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._host = np.repeat(np.arange(cluster.hosts), cluster.devices)
        self._out = np.zeros(cluster.hosts)
        self._in = np.zeros(cluster.hosts)

    def exchange(self, todo: Iterable[Round], ready: np.ndarray) -> np.ndarray:
        """When each device is done with these rounds, of those ready at these times."""
        times = ready.copy()
        for one in todo:
            times[one.senders] += one.before
            if one.receivers.size:
                arrived = self._deliver(one, times[one.senders])
                there = np.maximum(times[one.receivers], arrived)
                times[one.receivers] = there + one.after
        return times

    def _deliver(self, one: Round, ready: np.ndarray) -> np.ndarray:
        """When each message has come."""
        link, inner = self._cluster.link, self._cluster.inner
        sources, targets = self._host[one.senders], self._host[one.receivers]
        outside = sources != targets
        share = one.share(self._cluster.shares)
        wire = one.bytes / link.bandwidth / share
        arrived = np.empty_like(ready)
        if inner is not None:
            arrived[:] = ready + inner.latency + one.bytes / inner.bandwidth / share
        where = np.flatnonzero(outside)
        if self._cluster.devices == 1:
            source, target = sources[where], targets[where]
            begin = np.maximum(self._out[source], self._in[target])
            done = np.maximum(begin, ready[where]) + wire
            self._out[source] = self._in[target] = done
            arrived[where] = done + link.latency
            return arrived
        for i in where[np.argsort(ready[where], kind="stable")]:
            source, target = sources[i], targets[i]
            done = max(ready[i], self._out[source], self._in[target]) + wire
            self._out[source] = self._in[target] = done
            arrived[i] = done + link.latency
        return arrived
