"""Timing models: how long an exchange and a step take, before they are run."""

from ._cluster import Cluster as Cluster
from ._cluster import CodecSpeed as CodecSpeed
from ._cluster import Link as Link
from ._exchange import FORMS as FORMS
from ._exchange import Counts as Counts
from ._exchange import Duration as Duration
from ._exchange import Exchange as Exchange
from ._exchange import duration as duration
from ._exchange import flat as flat
from ._exchange import hierarchical as hierarchical
from ._exchange import per_leaf as per_leaf
from ._iteration import Compute as Compute
from ._iteration import asynchronous as asynchronous
from ._iteration import ceilings as ceilings
from ._iteration import efficiency as efficiency
from ._iteration import overlapped as overlapped
from ._iteration import pipelined as pipelined
from ._iteration import synchronous as synchronous
from ._simulate import Trace as Trace
from ._simulate import Workload as Workload
from ._simulate import simulate as simulate
from ._simulate import simulate_asynchronous as simulate_asynchronous
