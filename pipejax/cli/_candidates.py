"""Codecs by the names that a command line gives, made as training would use them."""

from collections.abc import Iterable

from pipejax import codecs, timing

from ._usage import UsageError

USUAL = ("bf16", "int8", "fp8_e4m3", "int4", "power_sgd")
"""The codecs that commands consider by default, and whose speeds can be assumed.

Each of the other codecs loses more accuracy in docs/benchmarks/compression.md, is not
measured there, or sends about as many bytes as one of these.
"""
_WITH_PREDICTION = ("int8", "int4", "truncate")
# The codecs with which pipelined steps with weight prediction have been compared with
# synchronous training: int8 and truncate in `ring` on images, and int8 and int4 with
# error feedback in `two_shot` on text. See docs/benchmarks/speed.md.
_IN_ROUNDS = ("int4",)  # with error feedback; docs/benchmarks/accuracy_sharded.md


def candidates(names: Iterable[str]) -> dict[str, codecs.Codec]:
    """Makes the codecs that `--codecs` names, with feedback if `feeds_back` says so."""
    names = list(names)
    if unknown := [name for name in names if name not in codecs.NAMES]:
        raise UsageError(
            f"`--codecs` must be names out of {', '.join(codecs.NAMES)}; got"
            f" {', '.join(unknown)}"
        )
    found = {name: codecs.named(name) for name in names}
    return {
        name: codecs.error_feedback(codec) if _fed(name, codec) else codec
        for name, codec in found.items()
    }


def feeds_back(name: str) -> bool:
    """Returns whether commands use a codec with error feedback."""
    return _fed(name, codecs.named(name))


def is_measured(config: timing.TrainConfig) -> bool:
    """Returns whether the accuracy of training with this codec has been measured."""
    if config.codec is None or (config.width == 1 and not config.sync_every):
        return True
    if config.shard_optimizer or config.algorithm not in ("ring", "two_shot"):
        return False
    return config.codec in (_IN_ROUNDS if config.sync_every else _WITH_PREDICTION)


def _fed(name: str, codec: codecs.Codec) -> bool:
    # int4 also trains without error feedback, but docs/compression.md, "Which one",
    # recommends it.
    return codec.needs_feedback or name == "int4"
