"""All tables of the documents, by the names that the documents give them.

To add a table, add a line here, and to a document the comments between which it stands.
"""

from collections.abc import Callable
from typing import Any

from experiments import (
    allreduce_profile,
    codec_speed,
    codecs,
    compile_time,
    delay_robust,
    levels,
    memory,
    prediction,
    scaling,
    time_to_accuracy,
)
from experiments.clients import _table as clients
from experiments.convergence import _show, sharpness
from experiments.convex import __main__ as convex
from experiments.faults import __main__ as faults
from experiments.faults import endurance, goodput, start
from experiments.report import result
from experiments.sharded import cluster as sharded_cluster
from experiments.sharded import compiled, nanogpt
from experiments.sharded_optimizer import accuracy, cluster

from . import _gpu, _overlap, _paper, _speed, _stability

Table = list[list[str]]  # rows of cells; the first row holds the titles


def _profile(*shapes: tuple[int, int]) -> list[dict[str, Any]]:
    """Returns the cells of these numbers of hosts, and of devices of each host."""
    cells = result("allreduce_profile")["cells"]
    of_shape = {(cell["hosts"], cell["devices"]): cell for cell in cells}
    return [of_shape[shape] for shape in shapes]


TABLES: dict[str, Callable[[], Table]] = {
    "clients.programs": lambda: clients.rows(result("clients")["programs"], "program"),
    "clients.optimizers": lambda: clients.rows(
        result("clients")["optimizers"], "optimizer"
    ),
    "clients.refused": lambda: clients.refusals(result("clients")["optimizers"]),
    "codec_speed": lambda: codec_speed.table(result("codec_speed")["pages"]),
    "codecs": lambda: codecs.table(result("codecs")["codecs"]),
    "compile_time": lambda: compile_time.table(result("compile_time")["leaves"]),
    "convergence": lambda: _show.rows(result("convergence")),
    "convergence.counts": lambda: _show.counts(result("convergence")),
    "convergence.ends": lambda: _show.ends(result("convergence")),
    "convergence.sharpness": lambda: sharpness.rows(
        result("convergence_sharpness")["runs"], result("convergence")
    ),
    "convex.codecs": lambda: convex.width_rows(result("convex")["codecs"], "codec"),
    "convex.regret": lambda: convex.regret_rows(result("convex")),
    "delay_robust": lambda: delay_robust.rows(result("delay_robust")["test_loss"]),
    "faults": lambda: faults.rows(result("faults")["outcomes"]),
    "faults.endurance": lambda: endurance.rows(result("faults_endurance")["diaries"]),
    "faults.goodput": lambda: goodput.rows(result("faults_goodput")["cells"]),
    "faults.start": lambda: start.rows(
        result("faults_start")["found"], result("faults_start")["hosts"]
    ),
    "gpu.codecs": _gpu.codecs,
    "gpu.link": _gpu.link,
    "gpu.memory": _gpu.memory,
    "gpu.steps": _gpu.steps,
    "levels": lambda: levels.table(result("levels")["rows"]),
    "memory": _overlap.memory,
    "overhead": _speed.overhead,
    "overlap.gpus": _overlap.gpus,
    "overlap.tpus": _overlap.tpus,
    "paper.parts": _paper.parts,
    "paper.steps": _paper.steps,
    "prediction": lambda: prediction.rows(result("prediction")["cells"]),
    "profile.phases": lambda: allreduce_profile.phases(_profile((4, 1), (4, 2))),
    "profile.whole": lambda: allreduce_profile.whole(_profile((2, 1), (4, 1), (8, 1))),
    "scaling": lambda: scaling.table(result("scaling")["cells"]),
    "sharded.cluster": lambda: sharded_cluster.rows(
        result("sharded_cluster")["cells"], result("sharded_cluster")["rate"]
    ),
    "sharded.compiled": lambda: compiled.rows(result("sharded_compiled")["cells"]),
    "sharded.nanogpt": lambda: nanogpt.rows(result("sharded_nanogpt")["cells"]),
    "sharded_optimizer.accuracy": lambda: accuracy.rows(
        result("convergence"), result("sharded_optimizer_accuracy")["runs"]
    ),
    "sharded_optimizer.cluster": lambda: cluster.rows(
        result("sharded_optimizer_cluster")["cells"]
    ),
    "sharded_optimizer.memory": lambda: memory.rows(result("memory")["cells"]),
    "speedup.gains": _speed.gains,
    "speedup.limits": _speed.limits,
    "speedup.measured": _speed.measured,
    "speedup.steps": _speed.steps,
    "stability": _stability.table,
    "time_to_accuracy.cifar10": lambda: time_to_accuracy.rows(
        result("time_to_accuracy_cifar10")
    ),
    "time_to_accuracy.mnist": lambda: time_to_accuracy.rows(
        result("time_to_accuracy_mnist")
    ),
}
