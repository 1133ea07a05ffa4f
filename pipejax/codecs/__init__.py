"""What travels in place of a gradient."""

from . import int8 as int8
