"""
Implements pipelined training of a linear model in NumPy, by hand and in float64.

With w the parameters, u the update of the optimizer and g the mean over workers,
`w[t] = w[t-1] - u(g[t-K])`. Worker i takes its gradient at its prediction, for which it
applies its own K - 1 gradients in flight to the parameters, in their order. For the
optimizers here that are linear in the gradient, this is what both rules of prediction
mean. They differ in a worker of weight 0, see `ByHand`.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

RATES = {"sgd": 0.3, "momentum": 0.1, "adam": 0.02}
DECAY, SECOND, EPS = 0.9, 0.99, 1e-2


class Message(NamedTuple):
    """Holds what a worker contributes to a step."""

    weight: float
    gradients: dict
    changes: dict
    loss: float
    error: float  # a metric


class Report(NamedTuple):
    """Holds the report of a step on the message that it has applied."""

    arrived: bool
    loss: float = np.nan
    error: float = np.nan
    weight: float = 0.0


def combined(function, *trees):
    """Returns a dict of the function's results for the arrays of each name."""
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def updated(optimizer, params, opt_state, gradients):
    """Returns the parameters and the state of the optimizer after an update."""
    rate, count = RATES[optimizer], opt_state.get("count", 0) + 1
    if optimizer == "sgd":
        return combined(lambda w, g: w - rate * g, params, gradients), opt_state
    first = opt_state.get("first") or combined(np.zeros_like, params)
    if optimizer == "momentum":
        first = combined(lambda m, g: DECAY * m + g, first, gradients)
        return combined(lambda w, m: w - rate * m, params, first), {"first": first}
    second = opt_state.get("second") or combined(np.zeros_like, params)
    first = combined(lambda m, g: DECAY * m + (1 - DECAY) * g, first, gradients)
    second = combined(lambda v, g: SECOND * v + (1 - SECOND) * g**2, second, gradients)

    def moved(w, m, v):
        root = np.sqrt(v / (1 - SECOND**count))
        return w - rate * m / (1 - DECAY**count) / (root + EPS)

    after = {"first": first, "second": second, "count": count}
    return combined(moved, params, first, second), after


def part_by_hand(params, model_state, part):
    """Returns the message of a batch, as a loss of the tests would, and its state."""
    x, y, keep = (part[name].astype(np.float64) for name in ("x", "y", "keep"))
    weight, inputs = keep.sum(), x - model_state["mean"]
    errors = inputs @ params["w"] + params["b"] + model_state["last"] - y
    examples, of_each = max(weight, 1.0), y.shape[1]
    slopes = 2 * keep[:, None] * errors / (examples * of_each)
    after = {
        "mean": 0.5 * model_state["mean"] + 0.5 * x.mean(axis=0),
        "last": (inputs @ params["w"]).mean(),
    }
    message = Message(
        weight=weight,
        gradients={"w": inputs.T @ slopes, "b": slopes.sum(axis=0)},
        changes={},
        loss=(keep[:, None] * errors**2).sum() / (examples * of_each),
        error=(keep[:, None] * errors).sum() / (examples * of_each),
    )
    return message, after if weight else model_state


@dataclasses.dataclass
class ByHand:
    """
    Training by hand.

    Attributes:
      params: Weights "w" and "b".
      optimizer: A key of `RATES`.
      width: The width K.
      rule: How workers predict: "linearized", "own" or False. By the first, a worker
        of weight 0 takes its gradient to be 0. By "own", it leaves out the update.
      microbatches: The number of parts of a worker's batch.
      stateful: Whether the loss changes the model state.
      weighted: Whether parts count by their weights.
    """

    params: dict
    optimizer: str = "sgd"
    width: int = 2
    rule: str | bool = False
    microbatches: int = 1
    stateful: bool = False
    weighted: bool = False

    def __post_init__(self):
        self.params = combined(lambda x: x.astype(np.float64), self.params)
        self.opt_state, self.queue = {}, []
        inputs, _ = self.params["w"].shape
        # An average, and a value that each step replaces.
        self.model_state = {"mean": np.zeros(inputs), "last": np.zeros(())}

    def step(self, parts):
        """Takes each worker's part of a batch, and returns what arrives."""
        self.queue.append([self._message(i, part) for i, part in enumerate(parts)])
        return self._apply() if len(self.queue) == self.width else Report(False)

    def drain(self):
        """Returns what arrives in each of the K - 1 places of the queue."""
        empty = [Report(False)] * (self.width - 1 - len(self.queue))
        return empty + [self._apply() for _ in range(len(self.queue))]

    def _message(self, worker, part):
        """Returns the message of a worker, which it takes ahead of the others."""
        params, opt_state, before = self.params, self.opt_state, self.model_state
        for own in (messages[worker] for messages in self.queue):
            before = combined(np.add, before, own.changes)
            if self.rule == "linearized" or (self.rule and own.weight):
                given = params, opt_state, own.gradients
                params, opt_state = updated(self.optimizer, *given)
        after, found = before, []
        for each in range(self.microbatches):
            piece = combined(lambda x, i=each: np.split(x, self.microbatches)[i], part)
            message, new = part_by_hand(params, after, piece)
            found.append(message)
            after = new if self.stateful else after
        weight, mean = self._mean(found)
        changes = combined(np.subtract, after, before)
        return Message(weight, mean[0], changes, *mean[1:])

    def _mean(self, messages):
        """Returns the weight of several messages, and their weighted mean."""
        weights = np.array([x.weight if self.weighted else 1.0 for x in messages])
        total = weights.sum()
        shares = weights / (total or 1.0)

        def mean(*values):
            return sum(share * x for share, x in zip(shares, values, strict=True))

        return (total if self.weighted else float(bool(total))), (
            combined(mean, *(x.gradients for x in messages)),
            mean(*(x.loss for x in messages)),
            mean(*(x.error for x in messages)),
        )

    def _apply(self):
        messages = self.queue.pop(0)
        weight, (gradients, loss, error) = self._mean(messages)
        if not weight:
            return Report(False)
        given = self.params, self.opt_state, gradients
        self.params, self.opt_state = updated(self.optimizer, *given)
        changes = combined(
            lambda *x: sum(x) / len(x), *(message.changes for message in messages)
        )
        self.model_state = combined(np.add, self.model_state, changes)
        return Report(True, loss, error, weight)
