"""Upper bounds of the error `|decode(encode(x)) - x|` of each codec.

They are the bounds in the docstrings, plus the rounding errors of float32.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pipejax.codecs._blocks import SMALL
from pipejax.codecs._cast import Cast, Truncate
from pipejax.codecs._error_feedback import ErrorFeedback
from pipejax.codecs._floats import Float4, Float8
from pipejax.codecs._integers import Integers
from pipejax.codecs._power_sgd import PowerSGD
from pipejax.codecs._quantize import Quantize
from pipejax.codecs._rotated import Rotated
from pipejax.codecs._rounding import Stochastic
from pipejax.codecs._signs import Sign, TwoBits
from pipejax.codecs._sparse import RandomK, TopK, count


@functools.singledispatch
def bound(codec, x):
    """Returns a bound for each element of x, `[n]`, or one for all of them.

    It is infinite where the codec guarantees nothing.
    """
    raise TypeError(codec)


def scales(codec, x):
    """Returns x in blocks, float32 `[b, block]`, and their scales, `[b, 1]`."""
    blocks = x.astype(jnp.float32).reshape(-1, codec.block)
    return blocks, codec.scale(blocks)


@bound.register
def _(codec: Integers, x):
    """Returns half the level spacing, `s / 2L`."""
    _, scale = scales(codec, x)
    # A block below SMALL decodes to zeros, so its error is at most its scale. 2e-5
    # levels are for rounding: in float32, the largest integer is off by 127 * 2^-24 =
    # 8e-6 levels after each of the products with `L / s` and `s / L`.
    level = jnp.where(scale < SMALL, scale, scale * ((0.5 + 2e-5) / codec.top))
    return jnp.broadcast_to(level, (level.size, codec.block)).reshape(-1)


@bound.register
def _(codec: Float4, x):
    """Returns half the distance of the four-bit floats around an element."""
    blocks, scale = scales(codec, x)
    # Slightly larger elements are taken, because the product with `6 / s` is rounded.
    # The spacing is 1/2 up to 2, then 1 up to 4, and 2 up to 6.
    units = (1 + 2e-5) * jnp.abs(blocks) * (6 / jnp.maximum(scale, SMALL))
    spacing = jnp.where(units < 2, 0.5, jnp.where(units < 4, 1.0, 2.0))
    error = scale / 6 * (spacing / 2 + 2e-5)
    return jnp.where(scale < SMALL, scale, error).reshape(-1)


@bound.register
def _(codec: Float8, x):
    """Returns half a unit in the last place, also for subnormal numbers."""
    info = jnp.finfo(codec.dtype)
    blocks, scale = scales(codec, x)
    # Subnormal numbers have the spacing of the smallest normal number. Half a unit in
    # the last place of `x` is at most 2^-nmant |x| / 2.
    least = scale * (float(info.smallest_normal) / codec.top)
    ulp = jnp.maximum(jnp.abs(blocks), least) * ((1 + 2e-5) * 2.0**-info.nmant / 2)
    return jnp.where(scale < SMALL, scale, ulp).reshape(-1)


@bound.register
def _(codec: Sign, x):
    """Returns `||x| - s|`."""
    blocks, scale = scales(codec, x)
    magnitude = jnp.abs(blocks)
    slack = 2e-5 * jnp.maximum(magnitude, scale)
    return (jnp.abs(magnitude - scale) + slack).reshape(-1)


@bound.register
def _(codec: TwoBits, x):
    """Returns `5m / 8`, `|x| - 15m / 8`, or infinity if `15m / 8` may overflow."""
    blocks, scale = scales(codec, x)
    magnitude = jnp.abs(blocks)
    slack = 2e-5 * jnp.maximum(magnitude, scale)
    error = jnp.maximum(5 / 8 * scale, magnitude - 15 / 8 * scale) + slack
    return jnp.where(jnp.isfinite(2 * scale), error, jnp.inf).reshape(-1)


@bound.register
def _(codec: Cast, x):
    """Returns half a unit in the last place, and infinity for what may overflow."""
    info = jnp.finfo(codec.dtype)
    if codec.dtype == "float32":
        return jnp.zeros_like(x)
    # A normal number has nmant mantissa bits. The subnormal numbers have the same
    # spacing as the smallest normal number.
    least = codec.headroom * float(info.smallest_normal)
    most = codec.headroom * float(info.max)
    ulp = jnp.maximum(jnp.abs(x), least) * 2.0 ** -(info.nmant + 1)
    return jnp.where(jnp.abs(x) <= most, ulp, jnp.inf)


@bound.register
def _(codec: Truncate, x):
    """Returns one unit in the last of the 7 mantissa bits that are sent."""
    tiny = float(jnp.finfo(jnp.float32).smallest_normal)
    return jnp.maximum(jnp.abs(x), tiny) * 2.0**-7


@bound.register
def _(codec: Quantize, x):
    """Returns half of the level spacing."""
    low, high = jnp.min(x, initial=jnp.inf), jnp.max(x, initial=-jnp.inf)
    level = high / codec.top - low / codec.top
    level = jnp.where(level < 2.0**-100, level * 0, level)
    # If the levels coincide, every element decodes to the minimum. If the spread
    # overflows, decoding may overflow too.
    all_one = (level == 0) | jnp.isinf(high - low)
    rounding = 1e-6 * (jnp.max(jnp.abs(x), initial=0.0) + level)
    return jnp.where(all_one, high - low, level / 2) + rounding


@bound.register
def _(codec: TopK, x):
    """Returns the smallest magnitude that is sent of a chunk, or the values' bound."""
    chunks, length, k, _ = codec._chosen(x.size)
    padded = jnp.pad(jnp.abs(x), (0, chunks * length - x.size))
    # An element that is dropped has an error of its own magnitude, at most this.
    least = lax.top_k(padded.reshape(chunks, length), k)[0][:, -1:]
    dropped = jnp.broadcast_to(least, (chunks, length)).reshape(-1)[: x.size]
    largest = jnp.full(codec.values.multiple, jnp.max(padded))
    return jnp.maximum(dropped, bound(codec.values, largest)[0])


@bound.register
def _(codec: RandomK, x):
    """Returns `|x|`, or `(m - 1) |x|` if values are scaled up by `m > 2`."""
    strata = -(-x.size // count(codec.k, x.size))
    # A drawn element decodes to m x, with an error of (m - 1) |x|, and any other to 0,
    # with an error of |x|.
    times = max(1, strata - 1) if codec.scaled else 1
    sent = (strata if codec.scaled else 1) * jnp.abs(x)
    return jnp.where(jnp.isinf(sent), sent, times * (1 + 1e-6) * jnp.abs(x))


@bound.register
def _(codec: PowerSGD, x):
    """Returns the Frobenius norm of an element's matrix, and 0 for other leaves."""
    bounds = []
    for leaf in codec.leaves(x):
        norm = jnp.zeros((), x.dtype)
        if codec._is_coded(leaf.shape):
            largest = jnp.max(jnp.abs(leaf))
            unit = leaf / jnp.where(largest == 0, 1.0, largest)
            # `P Q^T = P P^T M` is a projection of M. The Frobenius norm of the error is
            # thus at most that of M, and no element of the error is larger than its
            # norm. 1e-4 is for rounding.
            norm = jnp.sqrt(jnp.sum(unit**2)) * (1 + 1e-4) * largest
            # The sums inside the matrix products may overflow.
            norm = jnp.where(jnp.isfinite(largest * unit.size), norm, jnp.inf)
        bounds.append(jnp.full(leaf.size, norm))
    return jnp.concatenate(bounds)


@bound.register
def _(codec: Rotated, x):
    """Returns `sqrt(n) e`, if the codec changes no rotated element by more than e."""
    # The scale of these codecs is a mean. Their error is largest beside small elements.
    outliers = isinstance(codec.codec, Sign)
    blocks = x.astype(jnp.float32).reshape(-1, codec.block)
    root = codec.block**0.5
    # A rotated element is the sum of n elements with signs, over sqrt(n).
    most = jnp.sum(jnp.abs(blocks) / root, axis=1, keepdims=True)
    most = jnp.broadcast_to(most, blocks.shape).reshape(-1)
    # A block of the codec may decode to zeros, or its elements may be denormal.
    tiny = SMALL + float(jnp.finfo(jnp.float32).smallest_normal)
    # 1e-5 is for rounding in two products of up to 1,024 terms. The sums may overflow.
    error = most if outliers else bound(codec.codec, most)
    error = root * (error + tiny + 1e-5 * most)
    return jnp.where(jnp.isfinite(root * most), error, jnp.inf)


@bound.register
def _(codec: Stochastic, x):
    # `floor(y + u)` is off by less than one level, and `round(y)` by at most half.
    return 2 * bound(codec.codec, x)


@bound.register
def _(codec: ErrorFeedback, x):
    """Returns the wrapped codec's bound for x, the gradient plus the residual."""
    return bound(codec.codec, x)
