"""The device memory that a compiled program needs."""

from typing import Any, NamedTuple

import jax


class Memory(NamedTuple):
    """The memory that a program needs on one device, in bytes, as XLA assigned it.

    Attributes:
      arguments: Bytes of the program's arguments.
      outputs: Bytes of its outputs.
      temporaries: Bytes of everything that it allocates while it runs: activations,
        copies and buffers of collectives.
      aliased: Bytes of the outputs that take the place of donated arguments.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

    @classmethod
    def of(cls, program: jax.stages.Compiled) -> "Memory | None":
        """Returns the memory of a compiled program, or `None` if it is not reported."""
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
        """Returns the number of bytes that the program needs at its peak.

        $$live = arguments + outputs + temporaries - aliased$$

        This leaves out arrays that the caller holds and the program does not use: for a
        train step, the messages that stay in flight during the step.
        """
        return self.arguments + self.outputs + self.temporaries - self.aliased

    def to_dict(self) -> dict[str, int]:
        """Returns all numbers by name, including `live`."""
        return {**self._asdict(), "live": self.live}
