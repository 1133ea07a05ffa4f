"""What a compiled program needs of a device's memory."""

from typing import Any, NamedTuple

import jax


class Memory(NamedTuple):
    """Bytes on one device, as XLA's buffer assignment has them.

    Attributes:
      arguments: what the program is given.
      outputs: what it returns.
      temporaries: what it needs meanwhile: activations, copies, buffers of collectives.
      aliased: outputs that lie where donated arguments lay.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

    @classmethod
    def of(cls, program: jax.stages.Compiled) -> "Memory | None":
        """Returns what a program needs; `None` if its backend does not say.

        >>> compiled = jax.jit(lambda x: 2 * x).lower(jax.numpy.ones(8)).compile()
        >>> Memory.of(compiled).live
        64
        """
        found: Any = program.memory_analysis()
        if found is None:
            return None
        return cls(
            arguments=found.argument_size_in_bytes,
            outputs=found.output_size_in_bytes,
            temporaries=found.temp_size_in_bytes,
            aliased=found.alias_size_in_bytes,
        )

    @property
    def live(self) -> int:
        """The most that is held at once: `arguments + outputs + temporaries - aliased`.

        Other arrays that the caller holds are not in it, such as messages in flight
        that stay in flight during a step.
        """
        return self.arguments + self.outputs + self.temporaries - self.aliased

    def to_dict(self) -> dict[str, int]:
        """Returns all numbers by name, with `live`."""
        return {**self._asdict(), "live": self.live}
