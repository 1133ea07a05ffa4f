"""Executors, which run the compute, the exchange and the update of a train step.

- `Fused` runs a step as one program, in which the collectives overlap with compute.
- `Host` runs compute and update as two programs, and the exchange as a third one on a
  communication thread.

Both take a step, drain, and lower the program in which a step computes. A state can go
from one to the other. `choose` returns the executor for a given name and mesh.

`Rounds` takes local steps, by `FusedRounds` or `HostRounds`.
"""

from pipejax._internal.communication_thread import join as join

from ._check_rounds import check_round_codecs as check_round_codecs
from ._check_rounds import check_round_optimizers as check_round_optimizers
from ._check_rounds import check_rounds as check_rounds
from ._choose import Executor as Executor
from ._choose import choose as choose
from ._codec_states import check_codec_states as check_codec_states
from ._codec_states import codec_states as codec_states
from ._config import StepConfig as StepConfig
from ._fused import Fused as Fused
from ._fused_rounds import FusedRounds as FusedRounds
from ._host import Host as Host
from ._host_rounds import HostRounds as HostRounds
from ._initial_rounds import rescheduled as rescheduled
from ._initial_rounds import round_codec_states as round_codec_states
from ._initial_rounds import round_shapes as round_shapes
from ._options import compiler_options as compiler_options
from ._own_collectives import OwnCollectiveError as OwnCollectiveError
from ._own_collectives import spans_cpu_processes as spans_cpu_processes
from ._ready import ready_after as ready_after
from ._regroup import regrouped as regrouped
from ._round_config import RoundConfig as RoundConfig
from ._round_parts import Moves as Moves
from ._round_parts import Outcome as Outcome
from ._round_parts import RoundReads as RoundReads
from ._round_parts import StepKind as StepKind
from ._rounds import Rounds as Rounds
from ._rounds import parted as parted
from ._run_exchange import delayed_part as delayed_part
from ._run_exchange import make_exchange as make_exchange
from ._run_exchange import run_at_once as run_at_once
from ._shardings import in_flight_shardings as in_flight_shardings
from ._shardings import state_shardings as state_shardings
