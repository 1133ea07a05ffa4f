"""Reads the text of compiled programs: their collectives, and what runs beside them."""

from ._collective_groups import CollectiveGroups as CollectiveGroups
from ._collective_groups import collective_groups as collective_groups
from ._device_groups import MeshAxes as MeshAxes
from ._device_groups import is_mesh_of as is_mesh_of
from ._memory import Memory as Memory
from ._module import Module as Module
from ._parse import parse as parse
from ._reading import Reading as Reading
from ._report import Collective as Collective
from ._report import Item as Item
from ._report import Report as Report
from ._report import amount as amount
from ._report import two_digits as two_digits
