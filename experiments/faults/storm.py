"""Measures goodput under a storm of faults: some 125 an hour, for half an hour.

Claim: a job still advances if a process dies, a process is stopped or a whole host is
lost every half minute, and it ends with the bits of a job without faults.

The job is that of `experiments.faults.goodput`, with one seed.

Command: python -m experiments.faults.storm
Time: about 50 minutes on 2 cores.
Result: experiments/results/faults_storm.json
"""

import tyro

from experiments import report

from . import goodput

STORM = goodput.Config(
    steps=4000,
    # With the time that a fault costs, this makes some 125 faults an hour.
    between=50.0,
    kinds=("killed", "stopped", "host lost"),
    seeds=(0,),
    out=report.RESULTS / "faults_storm.json",
    plot=None,
)

if __name__ == "__main__":
    goodput.main(tyro.cli(goodput.Config, description=__doc__, default=STORM))
