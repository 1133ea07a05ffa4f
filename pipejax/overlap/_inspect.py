"""Reports which compute a program's schedule runs during its communication."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from pipejax._internal.hlo import (
    Memory,
    MeshAxes,
    Module,
    Reading,
    Report,
    is_mesh_of,
    parse,
)
from pipejax.train_step import LocalTrainStep, TrainStep


def inspect(
    program: Any,
    *args: Any,
    compiler_options: dict[str, Any] | None = None,
    mesh: Mesh | None = None,
    **keywords: Any,
) -> Report:
    """Reports which compute runs while the collectives of a program are in progress.

    XLA fixes the order of the instructions when it compiles a program. `inspect` reads
    this order and finds the instructions between the start of each collective and the
    instruction that waits for its result. If `f_c` of the program's `f` FLOPs are
    between the two ends of collective c, then

    $$share_c = f_c / f$$

    The `share` of the report is the mean over collectives, weighted by the bytes that
    they send. Only matmuls and convolutions count as FLOPs.

    `inspect` compiles the program if necessary and never runs it. Its devices may be
    absent: see `topology`. Use `measure` to find out whether the compute lasts long
    enough to hide the communication.

    Args:
      program: A jitted function, a `pj.TrainStep`, a `pj.LocalTrainStep` or another
        object with a method `lower`; a `jax.stages.Lowered`; a `jax.stages.Compiled`;
        or the text of scheduled HLO, as `Compiled.as_text()` returns it.
      *args: Arguments of `program.lower`, such as arrays or `jax.ShapeDtypeStruct`s. A
        train step takes a state, a batch and what its loss shares. Leave them out if
        `program` is lowered or compiled already.
      compiler_options: XLA options to compile with, by name. `None` uses the attribute
        `compiler_options` of `program` if it has one, as a `pj.TrainStep` does, and
        XLA's defaults otherwise. Leave it out if `program` is compiled already.
      mesh: Mesh that the program is compiled for. The report names each collective by
        the axes of this mesh along which its devices differ. `None` uses the attribute
        `mesh` of `program` if it has one, as a `pj.TrainStep` does, and otherwise the
        mesh of the `NamedSharding`s of `args` if all of them have the same mesh.
      **keywords: Keyword arguments of `program.lower`, such as `shared=...`.

    Returns:
      A `Report`. `print(report)` shows it as a table, and
      `timeline(report, "schedule.png")` draws it.

    Raises:
      ValueError: If `program` is none of these, is text that is not HLO, has no
        schedule, or is compiled for another number of devices than `mesh` has; if
        `args` or `compiler_options` are not left out where they must be; if the
        arguments of a `jax.pmap` have another first axis; if XLA fails in a known way;
        or if an instruction that may be a collective is not understood.

    Examples:
      A program on one device has FLOPs and no collectives:

      >>> step = jax.jit(lambda x: x @ x)
      >>> report = inspect(step, jax.ShapeDtypeStruct((8, 8), "float32"))
      >>> report.flops, len(report.collectives)
      (1024.0, 0)
    """
    if mesh is None:
        mesh = getattr(program, "mesh", None)
    program = _compiled(program, args, keywords, compiler_options)
    text = program if isinstance(program, str) else program.as_text() or ""
    if not text.strip().startswith("HloModule"):
        raise ValueError(
            "`program` must be HLO text, which begins with `HloModule`; got"
            f" {text.strip()[:40]!r}. Pass what `Compiled.as_text()` returns."
        )
    module = parse(text.strip())
    if not module.is_scheduled:
        raise ValueError(
            "`program` must be scheduled HLO, whose header has `is_scheduled=true`; got"
            f" {module.name} without it. Compile it: `lowered.compile().as_text()`, not"
            " `lowered.as_text()`."
        )
    mesh = mesh or _mesh_of(args, module)
    axes = None if mesh is None else MeshAxes(mesh, module)
    report = Reading(module, axes).report()
    known = isinstance(program, jax.stages.Compiled)
    return report._replace(memory=Memory.of(program) if known else None)


def _mesh_of(args: tuple[Any, ...], module: Module) -> Mesh | None:
    """Returns the mesh of the arguments' shardings, or `None` without a single one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    meshes = {x.mesh for x in shardings if isinstance(x, NamedSharding)}
    found = meshes.pop() if len(meshes) == 1 else None
    # A mesh of another size is that of an argument that the program does not use.
    return found if isinstance(found, Mesh) and is_mesh_of(found, module) else None


def _compiled(
    program: Any, args: tuple[Any, ...], keywords: dict[str, Any], options: Any
) -> Any:
    """Compiles a program that is not compiled yet; returns HLO text unchanged."""
    if isinstance(program, str | jax.stages.Compiled) and options is not None:
        raise ValueError(
            "`compiler_options` must be left out for a program that is compiled"
            f" already, got {options}. Pass the lowered program instead."
        )
    given = (*args, *keywords)
    if isinstance(program, str | jax.stages.Compiled | jax.stages.Lowered) and given:
        raise ValueError(
            f"`args` must be left out for a program that is lowered already, got"
            f" {len(given)} of them."
        )
    if isinstance(program, str):
        return program
    if not isinstance(program, jax.stages.Compiled | jax.stages.Lowered):
        if not hasattr(program, "lower"):
            got = getattr(program, "__name__", type(program).__name__)
            raise ValueError(
                "`program` must be compiled, lowered, HLO text, or have a method"
                f" `lower`; got {got}. If it is a function: `inspect(jax.jit({got}),"
                " *args)`."
            )
        # The options of a train step are a part of its program.
        own = getattr(program, "compiler_options", None)
        if options is None:
            options = own
        elif isinstance(program, TrainStep | LocalTrainStep):
            keywords = {**keywords, "own_options": False}
        program = _lowered(program, args, keywords)
    if isinstance(program, jax.stages.Lowered):
        return _of_xla(program, options)
    return program


def _lowered(program: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Lowers a program; says what to do if the arguments do not fit a `jax.pmap`."""
    try:
        return program.lower(*args, **keywords)
    except (IndexError, KeyError, ValueError) as error:
        if not getattr(program.lower, "__qualname__", "").startswith("pmap"):
            raise
        shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(args)]
        raise ValueError(
            "`args` must have a first axis with an element for each device of a"
            " jax.pmap, which is compiled for the devices of this machine, of which"
            f" there are {jax.local_device_count()}; got shapes {shapes!r:.200}. For"
            " other devices, make the program with"
            " jax.jit(jax.shard_map(function, mesh=mesh, ...))."
        ) from error


def _of_xla(lowered: jax.stages.Lowered, options: Any) -> jax.stages.Compiled:
    """Compiles a lowered program; names the flag that helps against a known failure."""
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "tile sizes" not in str(error):
            raise
        raise ValueError(
            "`program` must be one that XLA can compile; got"
            f" {str(error).splitlines()[0][:200]}. XLA fails at a matmul that it gives"
            " to Triton. Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false in the"
            " environment."
        ) from error
