"""The findings of `pipejax doctor`, as text and as JSON."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipejax import timing
from pipejax.overlap import Measurement

from ._model import Model
from ._rows import about_accuracy, chosen, exact, gain, said
from ._snippet import about_predictions, snippet

SHORT = 1.05
"""The smallest `Measurement.ceiling` at which the hidden share can be measured."""


class Overlap(NamedTuple):
    """How much of its communication a step hides on these devices."""

    of: str  # the program that was measured
    executor: str  # name of the program's executor, and the reason for it
    times: Measurement

    @property
    def hidden(self) -> float | None:
        """Returns the share of the shorter part that the longer hides, or `None`."""
        ceiling, ratio = map(statistics.median, (self.times.ceiling, self.times.ratio))
        # Communication takes less than a twentieth of compute, or the reverse.
        if ceiling < SHORT:
            return None
        # A ratio of 1 hides all of the shorter part, and one of `ceiling` hides
        # nothing.
        return min(1.0, max(0.0, (ceiling - ratio) / (ceiling - 1)))


class Advice(NamedTuple):
    """The ways to train a model on the measured cluster, with their step times.

    Attributes:
      cluster: The cluster.
      delayed: For each parameter whether its gradient must be delayed for the
        recommended way to hide its exchange, with one bool for a subtree of equal ones.
        `None` if that is not known, or if all must be.
      rounds: The ways with local steps, the best first, if the exchange of the
        recommended way takes much longer than the compute.
      one_core: Whether codec and additions run on the core that computes the model.
    """

    model: Model
    ways: list[timing.RankedConfig]
    cluster: timing.Cluster
    delayed: Any = None
    rounds: Sequence[timing.RankedConfig] = ()
    one_core: bool = False

    @property
    def shown(self) -> dict[str, timing.RankedConfig]:
        """Returns the ways that are worth a comparison, by what they stand for."""
        waits = (choice for choice in self.ways if choice.config.width == 1)
        found = {
            "synchronous": next(x for x in waits if x.config.codec is None),
            "pipelined": exact(self.ways),
            "recommended": chosen(self.ways),
        }
        if self.rounds:
            found["local steps"] = self.rounds[0]
        return found

    def __str__(self) -> str:
        shown = self.shown
        return "\n".join(
            [
                *(f"{name:<14}{said(choice)}" for name, choice in shown.items()),
                gain(),
                *about_accuracy(shown.values()),
                *about_predictions(
                    shown["recommended"].config, self.cluster, one_core=self.one_core
                ),
                "",
                self.python,
                *self._least_delay(),
                *self._local_steps(),
            ]
        )

    @property
    def python(self) -> str:
        """Returns the recommended train step as Python."""
        return self._python(chosen(self.ways).config)

    def _python(self, config: timing.TrainConfig) -> str:
        several = self.cluster.devices > 1
        inner = "device" if config.sync_every and several else None
        return snippet(config, self.cluster, inner=inner)

    def _local_steps(self) -> list[str]:
        if not self.rounds:
            return []
        return [
            "",
            "# No pipeline hides this exchange. Local steps need less time, and cost",
            "# accuracy: docs/local_steps.md",
            "",
            self._python(self.rounds[0].config),
        ]

    def _least_delay(self) -> list[str]:
        if self.delayed is None:
            return []
        return [
            "",
            "# Only these gradients must be delayed for the exchange to be hidden:",
            f"delayed = {self.delayed!r}  # an argument of pj.make_train_step",
        ]


def to_plan(share: str, flags: str) -> str:
    """Returns the command that gives the advice, and what devices share."""
    return (
        f"The devices of this program {share}. This command ranks its setups: pipejax"
        f" plan --hosts N --devices N --bandwidth RATE {flags}"
    )


class Diagnosis(NamedTuple):
    """All findings of `pipejax doctor`."""

    here: dict[str, str]  # devices and versions
    kept: dict[str, Any]  # compiler options that the installed compiler accepts
    dropped: dict[str, str]  # refused compiler options, each with the reason
    overlap: Overlap
    fit: timing.Fit | None  # `None` on a single device
    notes: Sequence[str]  # on what was measured
    advice: Advice | None
    plan: str = ""  # a command that is to give the advice, and why

    def __str__(self) -> str:
        parts = {
            "Devices and versions": [f"{k}: {v}" for k, v in self.here.items()],
            "Compiler options": self._options(),
            "Does communication overlap here?": self._overlap(),
            "Links and codecs": self._speeds(),
            "Your model": self._model(),
        }
        return "\n\n".join(
            "\n".join([title, "-" * len(title), *lines])
            for title, lines in parts.items()
        )

    def to_dict(self) -> dict[str, Any]:
        fit, advice = self.fit, self.advice
        return {
            "here": self.here,
            "compiler_options": {"kept": self.kept, "dropped": self.dropped},
            "overlap": {
                "of": self.overlap.of,
                "executor": self.overlap.executor,
                "hidden": self.overlap.hidden,
                **self.overlap.times._asdict(),
            },
            "cluster": fit and timing.as_json(fit.cluster),
            "fit": fit and timing.trust(fit).to_dict(),
            "model": advice and advice.model._asdict(),
            "ways": advice and [choice.to_dict() for choice in advice.ways],
            "local_steps": advice and [choice.to_dict() for choice in advice.rounds],
            "python": advice and advice.python,
            "delayed": advice and repr(advice.delayed),
        }

    def _options(self) -> list[str]:
        kept = [f"accepted: {name}={value!r}" for name, value in self.kept.items()]
        refused = [f"refused: {name}: {why}" for name, why in self.dropped.items()]
        return [*kept, *refused] or ["None are needed."]

    def _overlap(self) -> list[str]:
        found = self.overlap
        verdict = (
            "Communication and compute differ too much to tell how much is hidden."
            if found.hidden is None
            else f"{found.hidden:.0%} of what can be hidden is hidden."
        )
        if self.fit is None:
            verdict = "A single device has nothing to exchange."
        measured = f"measured: {found.of}, executor {found.executor}"
        return [measured, str(found.times), verdict]

    def _speeds(self) -> list[str]:
        if self.fit is None:
            return ["Start this command on every host of a cluster to measure them."]
        return [self.fit.speeds, str(timing.trust(self.fit)), *self.notes]

    def _model(self) -> list[str]:
        if self.advice is None:
            known = "`pipejax plan` calculates what a cluster would gain."
            return [self.plan or known]
        model = self.advice.model
        return [
            f"{model.elements:,} parameters, {model.compute:.1f} ms of compute a step",
            str(self.advice),
        ]
