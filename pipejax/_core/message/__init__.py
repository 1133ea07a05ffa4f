"""Messages: what a device contributes to a step, their sum, and those in flight."""

from ._exchange import Exchange as Exchange
from ._exchange import averaging as averaging
from ._in_flight import InFlight as InFlight
from ._in_flight import Valid as Valid
from ._in_flight import at_width_1 as at_width_1
from ._in_flight import count as count
from ._in_flight import emptied as emptied
from ._in_flight import empty as empty
from ._in_flight import entered as entered
from ._in_flight import shift as shift
from ._in_flight import valid_in_drain as valid_in_drain
from ._in_flight import valid_in_queue as valid_in_queue
from ._in_flight import valid_in_step as valid_in_step
from ._in_flight import width_of as width_of
from ._message import Message as Message
from ._message import Passengers as Passengers
from ._message import mean_as as mean_as
from ._message import mean_of as mean_of
from ._message import travelling as travelling
from ._message import with_constraints as with_constraints
from ._reduce import Reduced as Reduced
from ._reduce import codec_states as codec_states
from ._reduce import layout_of as layout_of
from ._reduce import message_of as message_of
from ._reduce import on_shards_of as on_shards_of
from ._reduce import summands as summands
