"""Provides a known cluster, to be written, read, and found again from its times."""

from pipejax.timing import Cluster, CodecSpeed, Link, Shares

KNOWN = Cluster(
    4,
    Link(2e-4, 62.5e6),
    reduction=4e9,
    synchronisation=5e-4,
    shares=Shares(pair=0.6, shift=0.9, shuffle=0.7),
    codecs={"int8": CodecSpeed(2e9, 3e9)},
)
