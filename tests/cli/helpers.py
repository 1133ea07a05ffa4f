"""Helps to test `pipejax plan` and the modules that it uses."""

import json

from pipejax import timing
from pipejax.cli import main
from pipejax.timing import Cluster, CodecSpeed, Link

CLUSTER = Cluster(
    4, Link(5e-5, 62.5e6), reduction=4e9, codecs={"int8": CodecSpeed(4e9, 4e9)}
)


GIVEN = ("--hosts", "4", "--devices", "8", "--bandwidth", "10gbit")


def plan(*where, parameters="4000000", compute="120"):
    return main(["plan", *where, "--parameters", parameters, "--compute-ms", compute])


def written(tmp_path, **record):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"cluster": timing.as_json(CLUSTER), **record}))
    return str(path)
