"""Snapshots of a state in host memory, for a restart that needs no checkpoint.

Each process of a job keeps a *part*: the blocks of all arrays that its devices hold. A
process of another host keeps a *copy* of those blocks of the part that it does not hold
itself. So the loss of one host loses nothing.
"""

from ._keeper import Keeper as Keeper
from ._keeper import Taken as Taken
from ._reading import from_memory as from_memory
