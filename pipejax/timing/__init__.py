r"""Timing models: how long an exchange and a training step take, before they are run.

A cluster is described by a few speeds (`Cluster`). `assumed` takes them from data
sheets and simple rules, and `calibrate` measures them. With c the compute time of a
step and x the time to exchange its gradients, a synchronous step and a step of Pipe-SGD
without weight prediction take

$$t_{sync} = c + x$$

$$t_{pipe} = \max(c, x)$$

- `flat` and `hierarchical` count the messages and bytes of an exchange. `duration`
  turns these counts into seconds.
- `synchronous_step_time`, `overlapped_step_time`, `pipelined_step_time`,
  `sharded_step_time` and `local_step_time` give the time of a step.
- `simulate` gives the time of a step where times vary and no closed form holds.
- `sharded` and `fsdp` tell what crosses between hosts from what stays inside a host,
  for a model that the devices of a host shard.
- `plan` ranks all ways to train by their step time, `shard_optimizer` those that can
  shard the optimizer, `local_steps` those that exchange in rounds, and `scaling`
  follows one of them to more hosts.
- `exchange_times` and `profile` measure all-reduces on a mesh. `fit` derives a cluster
  from measured times, and `trust` judges whether it can be relied on.
"""

from ._assumed import DEVICES as DEVICES
from ._assumed import LATENCY as LATENCY
from ._assumed import assumed as assumed
from ._calibrate import SIZES as SIZES
from ._calibrate import calibrate as calibrate
from ._cluster import Cluster as Cluster
from ._cluster import CodecSpeed as CodecSpeed
from ._cluster import Link as Link
from ._cluster import Shares as Shares
from ._counts import COST_MODELS as COST_MODELS
from ._counts import Counts as Counts
from ._counts import compatible as compatible
from ._exchange import Duration as Duration
from ._exchange import ExchangeCounts as ExchangeCounts
from ._exchange import duration as duration
from ._exchange import flat as flat
from ._exchange import hierarchical as hierarchical
from ._exchange import mean_inside_hosts as mean_inside_hosts
from ._fit import Fit as Fit
from ._fit import Sample as Sample
from ._fit import fit as fit
from ._hiding import batch_to_hide as batch_to_hide
from ._hiding import ceilings as ceilings
from ._hiding import least_delayed_share as least_delayed_share
from ._iteration import Compute as Compute
from ._iteration import overlapped_step_time as overlapped_step_time
from ._iteration import pipelined_step_time as pipelined_step_time
from ._iteration import sharded_step_time as sharded_step_time
from ._iteration import synchronous_step_time as synchronous_step_time
from ._leaves import square_leaves as square_leaves
from ._local_step_time import local_step_time as local_step_time
from ._local_steps import local_steps as local_steps
from ._picture import Panel as Panel
from ._picture import picture as picture
from ._picture import profile_picture as profile_picture
from ._plan import plan as plan
from ._plan import scaling as scaling
from ._profile import Profile as Profile
from ._profile import profile as profile
from ._record import as_json as as_json
from ._record import from_json as from_json
from ._sharded import Fsdp as Fsdp
from ._sharded import fsdp as fsdp
from ._sharded import sharded as sharded
from ._sharded_optimizer import shard_optimizer as shard_optimizer
from ._simulate import Trace as Trace
from ._simulate import simulate as simulate
from ._stopwatch import Case as Case
from ._stopwatch import exchange_times as exchange_times
from ._train_config import RankedConfig as RankedConfig
from ._train_config import TrainConfig as TrainConfig
from ._trust import FitQuality as FitQuality
from ._trust import trust as trust
from ._workload import Workload as Workload
