"""Codecs: how gradients are encoded for the wire.

An all-reduce algorithm takes a codec as its argument, for example
`pj.collectives.two_shot(pj.codecs.int8())`. `Codec` is the interface that all codecs
implement. `Linear` is the interface of codecs whose payloads can be summed without
decoding them.
"""

from ._acp_sgd import acp_sgd as acp_sgd
from ._cast import bf16 as bf16
from ._cast import cast as cast
from ._cast import truncate as truncate
from ._check import check_codec as check_codec
from ._codec import Codec as Codec
from ._codec import Linear as Linear
from ._error_feedback import ErrorFeedbackState as ErrorFeedbackState
from ._error_feedback import error_feedback as error_feedback
from ._floats import fp4 as fp4
from ._floats import fp8 as fp8
from ._integers import int4 as int4
from ._integers import int8 as int8
from ._named import NAMES as NAMES
from ._named import named as named
from ._power_sgd import power_sgd as power_sgd
from ._quantize import quantize as quantize
from ._rotated import rotated as rotated
from ._rounding import stochastic as stochastic
from ._signs import int2 as int2
from ._signs import sign as sign
from ._sparse import random_k as random_k
from ._sparse import top_k as top_k
