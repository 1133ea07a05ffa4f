"""
Draws programs with several train steps: which ones, and what is done in which order.

The same seed draws the same program on every process.
"""

import dataclasses

import numpy as np

from .by_hand import RATES


@dataclasses.dataclass(frozen=True)
class Setting:
    """
    How a train step is made.

    Most fields are arguments of `make_train_step` of the same names.

    Attributes:
      rule: The argument `weight_prediction`.
      sharded: Whether the devices of a host shard the model.
      coded: Whether a codec with error feedback encodes the gradients.
      stateful: Whether the loss changes a model state.
      weighted: Whether the loss returns a weight and a metric.
      loop: Whether this is a loop of a user's own with `pj.pipelined`.
    """

    executor: str = "auto"
    width: int = 2
    optimizer: str = "sgd"
    rule: str | bool = False
    shard_optimizer: bool = False
    sharded: bool = False
    coded: bool = False
    stateful: bool = False
    weighted: bool = False
    microbatches: int = 1
    donate: bool = False
    loop: bool = False

    @classmethod
    def drawn(cls, rng):
        """Draws a setting among those that are allowed and that NumPy can follow."""
        if rng.random() < 0.1:
            return cls(loop=True)
        optimizer, shard_optimizer = one_of(rng, *RATES), chance(rng, 0.3)
        rules = [False] if optimizer == "adam" else [False, "own", "linearized"]
        if shard_optimizer and optimizer != "adam":
            rules.remove("own")
        rule = one_of(rng, *rules)
        return cls(
            executor=one_of(rng, "host", "fused"),
            width=one_of(rng, 1, 2, 2, 3),
            optimizer=optimizer,
            rule=rule,
            shard_optimizer=shard_optimizer,
            sharded=chance(rng, 0.3),
            coded=not rule and chance(rng, 0.3),
            stateful=chance(rng, 0.3),
            weighted=chance(rng, 0.3),
            microbatches=one_of(rng, 1, 1, 2),
            donate=chance(rng, 0.3),
        )

    @property
    def names(self):
        """Returns what the setting has, such as "width=2"."""
        return {f"{name}={value}" for name, value in dataclasses.asdict(self).items()}


KINDS = {
    "host": Setting("host"),
    "wide": Setting(width=3),
    "synchronous": Setting(width=1),
    "fused": Setting("fused"),
    "sharded optimizer": Setting(shard_optimizer=True),
    "sharded": Setting(sharded=True),
    "both": Setting(sharded=True, shard_optimizer=True),
    "pipelined": Setting(loop=True),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """
    What a program does.

    Attributes:
      seed: Seed of parameters and batches.
      devices: The number of devices of each host.
      settings: How its train steps are made.
      actions: Pairs of an action, a method of `mixed.Play`, and the number of a train
        step, in order.
    """

    seed: int
    devices: int
    settings: tuple[Setting, ...]
    actions: tuple[tuple[str, int], ...]

    @classmethod
    def drawn(cls, seed):
        """
        Draws a program of one to four train steps.

        Thirty programs share a dozen settings, and so most of what they compile.
        """
        pool = np.random.default_rng([seed // 30, 0])
        known = [Setting.drawn(pool) for _ in range(12)]
        rng = np.random.default_rng([seed, 1])
        devices = one_of(rng, 1, 2)
        settings = [one_of(rng, *known) for _ in range(rng.integers(1, 4))]
        if all(each.loop for each in settings) or chance(rng, 0.5):
            settings.insert(0, Setting("host"))
        actions = drawn_actions(rng, rng.integers(8, 24), settings)
        if chance(rng, 0.5):
            actions.insert(len(actions) // 2, ("save_and_restore", -1))
        return cls(seed, devices, tuple(settings), tuple(actions))

    @classmethod
    def of_kinds(cls, seed, devices, count, *kinds):
        """Draws `count` actions for one train step of each of these kinds."""
        settings = tuple(KINDS[kind] for kind in kinds)
        actions = drawn_actions(np.random.default_rng(seed), count, settings)
        return cls(seed, devices, settings, tuple(actions))

    @property
    def names(self):
        """Returns what the program has, such as "width=2", "drain" and "devices=1"."""
        found = {action for action, _ in self.actions} | {f"devices={self.devices}"}
        return found.union(*(each.names for each in self.settings))


def drawn_actions(rng, count, settings):
    """Draws actions, most of which are steps. Nothing can drain a user's own loop."""
    actions = []
    for _ in range(count):
        number, found = int(rng.integers(len(settings))), rng.random()
        if found < 0.8 or (found < 0.9 and settings[number].loop):
            actions.append(("step", number))
        elif found < 0.9:
            actions.append(("drain", number))
        elif found < 0.95:
            actions.append(("make_anew", number))
        else:
            actions.append(("evaluate", number))
    return actions


def one_of(rng, *values):
    """Returns one of some values, each with the same probability."""
    return values[rng.integers(len(values))]


def chance(rng, probability):
    """Returns true with this probability."""
    return bool(rng.random() < probability)
