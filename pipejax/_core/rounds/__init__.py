"""Rounds of local steps: what a group does alone, and what groups exchange."""

from ._flat import Chunk as Chunk
from ._form import Form as Form
from ._info import Arrival as Arrival
from ._info import LocalInfo as LocalInfo
from ._info import RoundInfo as RoundInfo
from ._mean import mean_of_groups as mean_of_groups
from ._model_state import agreed_on as agreed_on
from ._model_state import at_agreed as at_agreed
from ._model_state import changes_of as changes_of
from ._points import moved as moved
from ._points import points_of as points_of
from ._round import ChunkState as ChunkState
from ._round import arrived as arrived
from ._round import check_report as check_report
from ._round import difference as difference
from ._round import inner_step as inner_step
from ._round import message_of as message_of
from ._round import refused_after as refused_after
from ._round import reporting as reporting
from ._round import synchronous_step as synchronous_step
from ._state import GroupModel as GroupModel
from ._state import GroupState as GroupState
from ._state import LocalState as LocalState
from ._state import Position as Position
from ._state import RoundPassengers as RoundPassengers
from ._state import Shared as Shared
