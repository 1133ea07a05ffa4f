"""The step time of PS-Async, whose workers do not wait for one another."""

import heapq

import numpy as np

from pipejax import timing


def asynchronous_step_time(
    cluster: timing.Cluster, compute: timing.Compute, n: int
) -> float:
    r"""Returns the seconds in which PS-Async applies one gradient of every worker.

    In the paper's PS-Async, each worker pulls the parameters from the server, computes,
    and pushes its gradient, without waiting for any other worker. The server is also a
    worker. It adds every gradient, and its link carries the parameters and gradients of
    all other workers. With p workers, c the compute time, and s bytes of gradient,

    $$t = \max(c + 2 (\alpha + s \beta), (p - 1) s \beta, (p - 1) s \gamma)$$

    The three terms are the cycle of one worker, the server's link and the server's
    additions. A single worker takes c. On average, other workers change the parameters
    p - 1 times between the pull and the push of a gradient.

    Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619

    Args:
      cluster: A cluster with one device per host; p is `cluster.hosts`. Its link has
        the latency alpha and the bandwidth 1 / beta, and its hosts add 1 / gamma bytes
        per second.
      compute: The compute times of a step; c is `compute.total`.
      n: The number of float32 elements of a gradient; s is 4 n bytes.
    """
    size, others = 4 * n, cluster.hosts - 1
    alone = compute.total
    if others:
        # The pull of the parameters, and the push of a gradient of the same size.
        alone += 2 * (cluster.link.latency + size / cluster.link.bandwidth)
    return max(
        alone,
        others * size / cluster.link.bandwidth,
        others * size / cluster.reduction,
    )


def simulate_asynchronous(
    cluster: timing.Cluster, workload: timing.Workload, steps: int, seed: int = 0
) -> np.ndarray:
    """Simulates PS-Async, the paper's asynchronous training with a parameter server.

    Each worker pulls the parameters, computes, and pushes its gradient, `steps` times
    and without waiting for other workers. The server is the first host, and also a
    worker. Its link serves messages in the order in which they arrive.
    `asynchronous_step_time` is the closed form for workers that are alike.

    Args:
      cluster: A cluster with one device per host, each of them a worker.
      workload: The work of a step. `algorithm`, `codec` and `speed` are not used.
      steps: The number of gradients of each worker.
      seed: The seed of the jitter.

    Returns:
      When the server has applied each gradient, in seconds from the start, sorted and
      of shape [hosts * steps].
    """
    p, size = cluster.hosts, 4 * workload.elements
    times = workload.compute_times(steps, p, np.random.default_rng(seed))
    wire = size / cluster.link.bandwidth
    free = {"pull": 0.0, "push": 0.0, "add": 0.0}
    applied = []
    # Each event is (time, worker, step, what the worker does then).
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
