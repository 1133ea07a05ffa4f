"""All tables of the documents, by the names that the documents give them.

To add a table, add a line here, and to a document the comments between which it stands.
"""

from collections.abc import Callable

from experiments import (
    allreduce_profile,
    codec_speed,
    codecs,
    compile_time,
    delay_robust,
    kernels,
    levels,
    memory,
    overhead,
    prediction,
    scaling,
    speedup,
    wire,
)
from experiments.clients import _table as clients
from experiments.convergence import _show, sharpness
from experiments.conversions import _table as conversions
from experiments.convex import __main__ as convex
from experiments.faults import __main__ as faults
from experiments.faults import endurance, goodput, start
from experiments.local_steps import accuracy as local_accuracy
from experiments.local_steps import cluster as local_cluster
from experiments.local_steps import compiled as local_compiled
from experiments.local_steps import equal_time as local_equal_time
from experiments.replicas import _table as replicas
from experiments.report import result
from experiments.sharded import cluster as sharded_cluster
from experiments.sharded import compiled, nanogpt
from experiments.sharded_optimizer import accuracy, work
from experiments.snapshot_cost import __main__ as snapshot_cost
from experiments.text_race import __main__ as text_race

from . import _faults, _gpu, _overlap, _paper, _results, _sharded, _speed, _stability

Table = list[list[str]]  # rows of cells; the first row holds the titles


def _of(make: Callable[..., Table], name: str, *keys: str) -> Callable[[], Table]:
    """Returns a function that makes a table of a result, or of what `keys` select."""

    def table() -> Table:
        record = result(name)
        return make(*(record[key] for key in keys) if keys else (record,))

    return table


def _sharpness() -> Table:
    return sharpness.rows(
        result("convergence_sharpness")["runs"], result("convergence")
    )


def _replicas() -> Table:
    return replicas.shown_rows(replicas.committed())


def _few_replicas() -> Table:
    """Returns the rows with few and with many replicas alone."""
    titles, *rows = _replicas()
    return [titles, *(row for row in rows if row[2] in ("4", "64"))]


def _accuracy() -> Table:
    runs = result("sharded_optimizer_accuracy")["runs"]
    return accuracy.rows(result("convergence"), runs)


TABLES: dict[str, Callable[[], Table]] = {
    "clients.programs": _of(clients.programs, "clients", "programs"),
    "clients.optimizers": _of(clients.optimizers, "clients", "optimizers"),
    "clients.refused": _of(clients.refusals, "clients", "optimizers"),
    "codec_speed": _of(codec_speed.table, "codec_speed", "pages"),
    "codecs": _of(codecs.table, "codecs", "codecs"),
    "compile_time": _of(compile_time.table, "compile_time", "leaves"),
    "convergence": _of(_show.rows, "convergence"),
    "convergence.counts": _of(_show.counts, "convergence"),
    "convergence.ends": _of(_show.ends, "convergence"),
    "convergence.sharpness": _sharpness,
    "conversions": _of(conversions.programs, "conversions", "programs"),
    "convex.codecs": _of(convex.codec_rows, "convex", "codecs"),
    "convex.regret": _of(convex.regret_rows, "convex"),
    "delay_robust": _of(delay_robust.rows, "delay_robust", "test_loss"),
    "faults": _of(faults.rows, "faults", "outcomes"),
    "faults.endurance": _of(endurance.rows, "faults_endurance", "diaries"),
    "faults.goodput": _of(goodput.rows, "faults_goodput", "cells"),
    "faults.storm": _of(goodput.rows, "faults_storm", "cells"),
    "faults.start": _of(start.rows, "faults_start", "found", "hosts"),
    "faults.summary": _faults.summary,
    "gpu.codecs": _gpu.codecs,
    "gpu.link": _gpu.link,
    "gpu.memory": _gpu.memory,
    "gpu.steps": _gpu.steps,
    "kernels": _of(kernels.rows, "kernels", "cells"),
    "levels": _of(levels.table, "levels", "rows"),
    "memory": _overlap.memory,
    "overhead": _of(overhead.table, "overhead", "models"),
    "local_steps.accuracy": _of(local_accuracy.rows, "local_steps_accuracy", "cells"),
    "local_steps.cluster": _of(
        local_cluster.rows, "local_steps_cluster", "cells", "others"
    ),
    "local_steps.equal_time": local_equal_time.committed,
    "local_steps.compiled": _of(local_compiled.rows, "local_steps_compiled", "cells"),
    "overlap.gpus": _overlap.gpus,
    "overlap.partly": _overlap.partly,
    "overlap.tpus": _overlap.tpus,
    "paper.parts": _of(_paper.parts, "paper", "cells"),
    "paper.steps": _of(_paper.steps, "paper", "cells"),
    "prediction": _of(prediction.rows, "prediction", "cells"),
    "replicas": _replicas,
    "replicas.few": _few_replicas,
    "replicas.cluster": _of(speedup.table_rows, "replicas_cluster", "cells"),
    "profile.phases": _of(allreduce_profile.phases, "allreduce_profile", "cells"),
    "profile.whole": _of(allreduce_profile.whole, "allreduce_profile", "cells"),
    "results": _results.table,
    "scaling": _of(scaling.table, "scaling", "cells"),
    "sharded.cluster": _of(sharded_cluster.rows, "sharded_cluster", "cells", "rate"),
    "sharded.compiled": _of(compiled.rows, "sharded_compiled", "cells"),
    "sharded.hidden": _sharded.hidden,
    "sharded.nanogpt": _of(nanogpt.rows, "sharded_nanogpt", "cells"),
    "sharded_optimizer.accuracy": _accuracy,
    "sharded_optimizer.cluster": _of(
        speedup.table_rows, "sharded_optimizer_cluster", "cells"
    ),
    "sharded_optimizer.memory": _of(memory.rows, "memory", "cells"),
    "sharded_optimizer.short": _sharded.memory,
    "sharded_optimizer.work": _of(work.rows, "sharded_optimizer_work", "cells"),
    "snapshot_cost": _of(snapshot_cost.rows, "snapshot_cost", "cells", "rate"),
    "speedup.headline": _speed.headline,
    "speedup.limits": _speed.limits,
    "speedup.measured": _speed.measured,
    "speedup.methods": _speed.methods,
    "speedup.steps": _speed.steps,
    "stability": _stability.table,
    "text_race": _of(text_race.rows, "text_race", "cells"),
    "time_to_accuracy.cifar10": lambda: _speed.race("CIFAR-10"),
    "time_to_accuracy.mnist": lambda: _speed.race("MNIST"),
    "wire": _of(wire.table, "wire", "rows"),
}
