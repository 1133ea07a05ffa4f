"""Proof that communication is hidden: schedules read and drawn, steps measured."""

from ._collective_groups import CollectiveGroups as CollectiveGroups
from ._collective_groups import collective_groups as collective_groups
from ._inspect import inspect as inspect
from ._measure import Measurement as Measurement
from ._measure import NoCommunication as NoCommunication
from ._measure import measure as measure
from ._memory import Memory as Memory
from ._report import Collective as Collective
from ._report import Report as Report
from ._timeline import timeline as timeline
from ._topology import topology as topology
