"""Damages checkpoints at random: each is restored exactly, or from the one before.

Claim: of 500 damaged checkpoints, none is restored wrongly. `checkpoint.restore`
returns every bit of the newest checkpoint, or every bit of the newest one that is
whole, and then says which step is damaged and how. The limit is zero wrong restores.

A run of width 2 with 8 bits and error feedback has three checkpoints. Each trial copies
its folder, damages the newest checkpoint in one place, and restores the newest. The
kinds of damage are: a flipped bit, a block of zeros, a file that is cut off, deleted or
empty, a file or an item (`state`, `meta`, `extras`) of the checkpoint before, a deleted
item, two files that have changed places, and a checkpoint under the name of another.
The file is drawn at random, half of the time from the files of the arrays.

A trial is *exact* if the newest checkpoint is restored although it was damaged, for
example in a byte that nothing reads. Otherwise it is *fell back*.

Command: python -m experiments.faults.checkpoints
Time: about two minutes on 2 cores.
Result: experiments/results/faults_checkpoints.json
"""

import dataclasses
import logging
import pathlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import pipejax as pj
from experiments import report
from pipejax import checkpoint

ITEMS = ("state", "meta", "extras")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the trials."""

    trials: int = 500
    """Number of damaged checkpoints. The kinds of damage take turns."""
    seed: int = 0
    """Seed of the places that are damaged."""
    out: pathlib.Path = report.RESULTS / "faults_checkpoints.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> int:
    """Runs all trials, prints the table, and writes the result file.

    Returns:
      The exit code, which is 1 if a checkpoint was restored wrongly or not at all.
    """
    jax.config.update("jax_platforms", "cpu")
    rng = np.random.default_rng(config.seed)
    trials = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train, saved = written(folder / "run")
        for number in range(config.trials):
            kind = [*KINDS][number % len(KINDS)]
            trials.append({"kind": kind, **trial(folder, train, saved, kind, rng)})
    outcomes = [{**each, "said": each["said"][:200]} for each in trials]
    report.save(config.out, **report.settings(config), limit=0, outcomes=outcomes)
    report.console().print(report.table("damaged checkpoints", rows(trials)))
    return int(any(each["outcome"] not in ("exact", "fell back") for each in trials))


def written(folder: pathlib.Path) -> tuple[pj.TrainStep, dict[int, Any]]:
    """Writes three checkpoints, and returns the train step and what was saved."""
    codec = pj.codecs.error_feedback(pj.codecs.int8())
    mesh = pj.data_mesh(1)
    train = pj.make_train_step(
        _loss,
        optax.adamw(1e-2),
        mesh=mesh,
        all_reduce=pj.collectives.two_shot(codec),
    )
    state, saved = start(train), {}
    rng = np.random.default_rng(0)
    with checkpoint.manager(folder, keep=None) as manager:
        for step in range(1, 7):
            state, _ = train.step(state, jnp.asarray(rng.normal(size=(8, 64))))
            if step % 2 == 0:
                extras = {"position": 8 * step}
                checkpoint.save(manager, state, extras)
                saved[step] = bits(state), extras
    return train, saved


def start(train: pj.TrainStep) -> pj.PipelineState:
    """Returns the state of the run at its start."""
    rng = np.random.default_rng(1)
    shapes = {"w": (64, 64), "v": (64, 32), "b": (32,)}
    params = {k: jnp.asarray(rng.normal(size=v) / 8) for k, v in shapes.items()}
    return train.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))


def _loss(params: Any, batch: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch @ params["w"]) @ params["v"] + params["b"][None, :]
    return jnp.mean(hidden**2)


def bits(state: Any) -> dict[str, tuple[str, bytes]]:
    """Returns the dtype and the bytes of each leaf, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): (str(leaf.dtype), np.asarray(leaf).tobytes())
        for path, leaf in leaves
    }


def trial(
    folder: pathlib.Path,
    train: pj.TrainStep,
    saved: dict[int, Any],
    kind: str,
    rng: np.random.Generator,
) -> dict[str, str]:
    """Damages a copy of the run and restores it; returns what became of it."""
    run = folder / "damaged"
    shutil.copytree(folder / "run", run)
    newest = max(saved)
    place = KINDS[kind](run, rng)
    said = _Said()
    logger = logging.getLogger("pipejax.checkpoint")
    logger.addHandler(said)
    logger.propagate = False  # to the console, which would show each damage
    try:
        with checkpoint.manager(run, keep=None) as manager:
            like = jax.eval_shape(lambda: start(train))
            found = checkpoint.restore(manager, train, like)
        step = int(found.state.step)
        whole = step in saved and saved[step] == (bits(found.state), found.extras)
        told = f"checkpoint of step {newest}" in said.text
        if not whole:
            outcome = "wrong"
        elif step == newest:
            outcome = "exact"
        else:
            outcome = "fell back" if told else "fell back in silence"
    except Exception as error:  # any way to refuse is an outcome of the trial
        outcome, said.text = "refused", f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(said)
        logger.propagate = True
        shutil.rmtree(run)
    return {"place": place, "outcome": outcome, "said": said.text}


class _Said(logging.Handler):
    """Keeps the text of all warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def _steps(run: pathlib.Path) -> list[pathlib.Path]:
    return sorted(
        (p for p in run.iterdir() if p.name.isdigit()), key=lambda p: int(p.name)
    )


def _file(run: pathlib.Path, rng: np.random.Generator) -> pathlib.Path:
    """Draws a file of the newest checkpoint that is not empty."""
    newest = _steps(run)[-1]
    files = sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size)
    arrays = [p for p in files if "d" in p.relative_to(newest).parts]
    chosen = arrays if arrays and rng.random() < 0.5 else files
    return chosen[rng.integers(len(chosen))]


def _edited(edit: Callable[[bytearray, np.random.Generator], bytearray]) -> Any:
    def damage(run: pathlib.Path, rng: np.random.Generator) -> str:
        file = _file(run, rng)
        file.write_bytes(edit(bytearray(file.read_bytes()), rng))
        return str(file.relative_to(run))

    return damage


def _flip(content: bytearray, rng: np.random.Generator) -> bytearray:
    content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    return content


def _zeros(content: bytearray, rng: np.random.Generator) -> bytearray:
    begin = int(rng.integers(len(content)))
    end = min(len(content), begin + 512)
    content[begin:end] = bytes(end - begin)
    return content


def _cut(content: bytearray, rng: np.random.Generator) -> bytearray:
    return content[: int(rng.integers(len(content)))]


def _empty(content: bytearray, rng: np.random.Generator) -> bytearray:
    del content, rng
    return bytearray()


def _deleted(run: pathlib.Path, rng: np.random.Generator) -> str:
    file = _file(run, rng)
    file.unlink()
    return str(file.relative_to(run))


def _former_file(run: pathlib.Path, rng: np.random.Generator) -> str:
    """Takes a file from the checkpoint before, if that has one of the same name."""
    file = _file(run, rng)
    before = _steps(run)[-2] / file.relative_to(_steps(run)[-1])
    if before.exists():
        shutil.copy(before, file)
    else:
        file.unlink()
    return str(file.relative_to(run))


def _swapped(run: pathlib.Path, rng: np.random.Generator) -> str:
    one, other = _file(run, rng), _file(run, rng)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"{one.relative_to(run)} and {other.relative_to(run)}"


def _former_item(run: pathlib.Path, rng: np.random.Generator) -> str:
    """Takes an item from the checkpoint before."""
    *_, before, newest = _steps(run)
    item = ITEMS[rng.integers(len(ITEMS))]
    shutil.rmtree(newest / item)
    shutil.copytree(before / item, newest / item)
    return f"{newest.name}/{item}"


def _no_item(run: pathlib.Path, rng: np.random.Generator) -> str:
    newest = _steps(run)[-1]
    item = ITEMS[rng.integers(len(ITEMS))]
    shutil.rmtree(newest / item)
    return f"{newest.name}/{item}"


def _renamed(run: pathlib.Path, rng: np.random.Generator) -> str:
    """Gives a copy of an earlier checkpoint the name of the newest."""
    *earlier, newest = _steps(run)
    chosen = earlier[rng.integers(len(earlier))]
    shutil.rmtree(newest)
    shutil.copytree(chosen, newest)
    return f"{chosen.name} as {newest.name}"


KINDS: dict[str, Callable[[pathlib.Path, np.random.Generator], str]] = {
    "flipped bit": _edited(_flip),
    "block of zeros": _edited(_zeros),
    "cut off": _edited(_cut),
    "empty": _edited(_empty),
    "deleted": _deleted,
    "file of the step before": _former_file,
    "files swapped": _swapped,
    "item of the step before": _former_item,
    "item deleted": _no_item,
    "step of another name": _renamed,
}


def rows(trials: list[dict[str, str]]) -> list[list[str]]:
    """Returns the table of outcomes, with a row for each kind of damage."""
    outcomes = ("exact", "fell back", "fell back in silence", "refused", "wrong")
    table = [["damage", *outcomes]]
    for kind in (*KINDS, "all"):
        counted = Counter(
            each["outcome"] for each in trials if kind in (each["kind"], "all")
        )
        table.append([kind, *(str(counted[outcome]) for outcome in outcomes)])
    return table


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
