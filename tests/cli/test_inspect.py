"""Tests what `pipejax inspect` prints and writes, and its exit status."""

import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
import types

import jax
import pytest

from pipejax.cli import _inspect, main

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = """
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    import pipejax as pj

    W = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    X = jax.ShapeDtypeStruct((64, 256), jnp.float32)


    def loss_fn(w, batch):
        return jnp.mean((batch @ w) ** 2)


    def make(mesh, **options):
        train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, **options)
        return train, jax.eval_shape(train.init, W), X


    def step(mesh):
        return make(mesh)


    def synchronous(mesh):
        return make(mesh, width=1)


    def shared(mesh):
        def scaled(w, batch, *, shared):
            return shared * loss_fn(w, batch)

        train = pj.make_train_step(scaled, optax.sgd(0.1), mesh=mesh)
        return train, train.abstract_state(W), X, 2.0


    def by_own(mesh):
        return make(mesh, weight_prediction="own")


    def on_a_thread(mesh):
        return make(mesh, executor="host")


    def in_rounds(mesh, overlap=4, **options):
        tx, rounds = optax.sgd(0.1), {"sync_every": 8, "overlap_steps": overlap}
        train = pj.make_local_step(loss_fn, tx, mesh=mesh, **rounds, **options)
        w, names = W, mesh.axis_names
        if len(names) > 1:
            place = jax.sharding.NamedSharding(mesh, P(names[1]))
            w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=place)
        return train, train.abstract_state(w), X


    def in_rounds_at_once(mesh):
        return in_rounds(mesh, overlap=0)


    def in_rounds_on_a_thread(mesh):
        return in_rounds(mesh, executor="host")


    def in_rounds_of_groups(mesh):
        devices = mesh.devices.flat
        mesh = pj.data_mesh(devices=devices, axis_name=("host", "fsdp"), hosts=2)
        return in_rounds(mesh, axis_name="host")


    def of_two_kinds(mesh):
        return in_rounds(mesh)[0], *make(mesh)[1:]


    def any_program(mesh):
        def local(x):
            return lax.psum(x @ x.T, "data")

        return jax.jit(jax.shard_map(
            local, mesh=mesh, in_specs=P("data"), out_specs=P()
        )), X


    def no_matmul(mesh):
        return jax.jit(lambda x: x + 1), X


    def alone(mesh):
        return step


    def lowered(mesh):
        return jax.jit(lambda x: x @ x.T).lower(X)


    def lowered_in_a_tuple(mesh):
        return (lowered(mesh),)


    def compiled(mesh):
        return lowered(mesh).compile()


    def text(mesh):
        return compiled(mesh).as_text()


    def too_long(mesh):
        return jax.pmap(lambda x: x @ x.T), jax.ShapeDtypeStruct((16, 4, 4), "float32")


    def not_jitted(mesh):
        return loss_fn, W, X


    def stateless(mesh):
        train, _, batch = make(mesh)
        return train, batch


    def sharded(mesh):
        devices = mesh.devices.flat
        mesh = pj.data_mesh(devices=devices, axis_name=("host", "fsdp"), hosts=2)
        train = pj.make_train_step(
            loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="host"
        )
        place = jax.sharding.NamedSharding(mesh, P("fsdp"))
        w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=place)
        return train, train.abstract_state(w), X


    def sharded_in_levels(mesh):
        names = "host", "device", "fsdp"
        mesh = jax.make_mesh((2, 2, 2), names, axis_types=3 * (AxisType.Auto,))
        train = pj.make_train_step(
            loss_fn, optax.sgd(0.1), mesh=mesh, axis_name=("host", "device"),
            all_reduce=pj.collectives.hierarchical(),
        )
        place = jax.sharding.NamedSharding(mesh, P("fsdp"))
        w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=place)
        return train, train.abstract_state(w), X


    def sharded_optimizer(mesh):
        return make(mesh, shard_optimizer=True)


    def own_fsdp(mesh):
        # A step without pipejax, whose weights a host shards.
        devices = mesh.devices.flat
        mesh = pj.data_mesh(devices=devices, axis_name=("host", "fsdp"), hosts=2)

        def placed(x, spec):
            place = jax.sharding.NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        w, x = placed(W, P("fsdp")), placed(X, P(("host", "fsdp")))
        return jax.jit(jax.grad(loss_fn)), w, x


    def lopsided(mesh):
        train, state, _ = make(mesh)
        return train, state, jnp.ones((9, 16))


    def buggy(mesh):
        raise ValueError("a mistake of one's own")


    number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Provides a working directory with `cli_programs`, a module not yet loaded."""
    (tmp_path / "cli_programs.py").write_text(textwrap.dedent(PROGRAMS))
    (tmp_path / "cli_broken.py").write_text("import no_such_dependency")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_programs", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def inspect(function, *flags):
    return main(["inspect", f"cli_programs:{function}", *flags])


def test_pipelined_step_and_synchronous_twin_are_shown_together(capsys):
    assert inspect("step") == 0
    printed, complaints = capsys.readouterr()
    assert complaints == ""
    lines = printed.splitlines()
    assert lines[:4] == [
        "target: here, 8 x cpu",
        "executor: fused (one process on CPU, with no network to wait for)",
        "compiler options: none",
        "dropped: none",
    ]
    assert [line for line in lines if "all-reduce " in line and "SYNC" in line]
    sent = "covered 0.00, share 0.00, collectives 1: 1 sync, 0 async, live "
    assert lines[-3].startswith(f"D-Sync (K=1): {sent}")
    assert lines[-2].startswith(f"pipelined (K=2): {sent}")
    assert lines[-2].endswith(" MB")


def test_last_line_of_inspect_is_a_command_for_plan(capsys):
    """The model has 65,536 parameters, and takes 64 examples on 8 devices."""
    inspect("step")
    about, _, command = capsys.readouterr().out.splitlines()[-1].partition(": ")
    assert about == "To predict its step time on a cluster, fill in N, RATE and MS"
    assert command == (
        "pipejax plan --hosts N --bandwidth RATE --parameters 65536 --compute-ms MS"
        " --batch 8 --one-core"
    )
    for name, value in {"N": "4", "RATE": "1gbit", "MS": "250"}.items():
        command = command.replace(f" {name} ", f" {value} ")
    assert main(shlex.split(command)[1:]) == 0
    assert "pj.make_train_step(" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "devices", "batch", "more"),
    [
        ("sharded", " --devices 4", 32, " --sharded --one-core"),
        (
            "in_rounds_of_groups",
            " --devices 4",
            32,
            " --sharded --local-steps --one-core",
        ),
        ("sharded_optimizer", "", 8, " --shard-optimizer --one-core"),
    ],
)
def test_command_for_plan_has_the_flags_of_a_step(
    function, devices, batch, more, capsys
):
    assert inspect(function) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith(
            f"pipejax plan --hosts N --bandwidth RATE{devices} --parameters 65536"
            f" --compute-ms MS --batch {batch}{more}"
        )
    )


@pytest.mark.parametrize(
    ("function", "title"),
    [("synchronous", "D-Sync (K=1)"), ("any_program", "program")],
)
def test_single_program_is_shown_alone(function, title, capsys):
    assert inspect(function) == 0
    printed = capsys.readouterr().out
    short = f"{title}: covered 0.00, share 0.00, collectives 1: 1 sync, 0 async, live "
    assert f"\n\n{short}" in printed
    assert "pipelined" not in printed
    assert ("pipejax plan" in printed) == (function == "synchronous")


def test_host_executor_is_reported_with_its_separate_all_reduce(capsys):
    assert inspect("on_a_thread") == 0
    printed = capsys.readouterr().out
    assert "executor: host (asked for)" in printed
    assert "The host executor runs the all-reduce as a separate program" in printed
    assert "dropped" not in printed


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("step", "pipelined (K=2): share of FLOPs under at least one collective: 0.00"),
        ("no_matmul", "program: share of FLOPs under at least one collective: none"),
    ],
)
def test_small_share_is_an_error_with_fail_under(function, complaint, capsys):
    assert inspect(function, "--fail-under", "0.9") == 1
    assert capsys.readouterr().err == f"pipejax: {complaint}, less than 0.9\n"


def test_axis_flag_counts_only_collectives_along_the_axis(capsys):
    """XLA sums a gradient over hosts and inside them in one collective."""
    assert inspect("own_fsdp", "--fail-under", "0.9", "--axis", "fsdp+host") == 1
    said = "at least one collective along host+fsdp: 0.00, less than 0.9\n"
    assert capsys.readouterr().err.endswith(said)
    assert inspect("sharded", "--fail-under", "0", "--axis", "host") == 0
    assert inspect("own_fsdp", "--axis", "host") == 2
    assert "`--axis` must come with `--fail-under`" in capsys.readouterr().err
    assert inspect("own_fsdp", "--fail-under", "0", "--axis", "tp") == 2
    assert re.search(
        r"`--axis` must name the mesh axes along .*got tp, and they run along .*host",
        capsys.readouterr().err,
    )


def test_exchange_in_levels_counts_by_each_of_its_axes(capsys):
    assert inspect("sharded_in_levels", "--fail-under", "0") == 0
    assert "over host" in capsys.readouterr().out


def test_share_equal_to_fail_under_is_no_error(capsys):
    assert inspect("step", "--fail-under", "0") == 0
    assert capsys.readouterr().err == ""


def test_json_file_holds_both_programs_and_their_collectives(folder):
    assert inspect("step", "--json", "report.json") == 0
    found = json.loads((folder / "report.json").read_text())
    assert found["target"] == "here, 8 x cpu"
    assert found["compiler options"] == found["dropped"] == {}
    assert list(found["programs"]) == ["D-Sync (K=1)", "pipelined (K=2)"]
    (collective,) = found["programs"]["pipelined (K=2)"]["collectives"]
    # The loss travels with the gradients.
    assert collective["bytes"] == 4 * (256 * 256 + 1)


def test_step_with_a_shared_input_is_shown(capsys):
    assert inspect("shared") == 0
    said = capsys.readouterr().out
    assert "D-Sync (K=1)" in said
    assert "pipelined (K=2)" in said
    assert "--parameters 65536" in said


def test_step_by_own_gradients_has_a_synchronous_twin(folder):
    assert inspect("by_own", "--json", "report.json") == 0
    found = json.loads((folder / "report.json").read_text())
    assert list(found["programs"]) == ["D-Sync (K=1)", "pipelined (K=2)"]


def test_plot_flag_writes_a_picture(folder):
    pytest.importorskip("matplotlib")
    assert inspect("step", "--plot", "schedule.png") == 0
    assert (folder / "schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "the program must be MODULE:FUNCTION, got 'nothing'"),
        (["no_such:step"], "there is no module 'no_such', neither in this folder nor"),
        (["cli_programs.no:step"], "there is no module 'cli_programs.no'"),
        (["gone/steps.py:step"], "there is no file 'gone/steps.py'"),
        (["cli_programs:gone"], "'cli_programs' has no function 'gone'"),
        (["cli_programs:number"], "'cli_programs' has no function 'number'"),
        (["cli_programs:alone"], "or a program that is lowered or compiled; got fun"),
        (["cli_programs:not_jitted"], "got (function, ShapeDtypeStruct, Shape"),
        (["cli_programs:stateless"], "got (TrainStep, ShapeDtypeStruct)"),
        (["cli_programs:too_long"], "`args` must have a first axis with an element fo"),
        (["cli_programs:lopsided"], "`batch` must divide among devices"),
        (["cli_programs:step", "--fail-under", "1.1"], "must be at most 1, got 1.1"),
        (["cli_programs:step", "--fail-under", "nan"], "must be at least 0, got nan"),
        (["cli_programs:step", "--target", "abacus"], "`target` must be"),
        (
            ["cli_programs:step", "--json", "gone/report.json"],
            "--json: must be the name",
        ),
    ],
)
def test_bad_input_of_inspect_is_reported_in_one_line(arguments, complaint, capsys):
    assert main(["inspect", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipejax: ")
    assert complaint in line


@pytest.mark.parametrize("name", ["lowered", "lowered_in_a_tuple", "compiled", "text"])
def test_programs_without_arguments_are_inspected(name, capsys):
    assert inspect(name) == 0
    assert "program: covered " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            "INTERNAL: number of output tile sizes, 1, must be 2\nmore",
            "`program` must be one that XLA can compile; got INTERNAL: number of output"
            " tile sizes, 1, must be 2. XLA fails at a matmul that it gives to Triton."
            " Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false in the environment.",
        ),
        ("INTERNAL: other\nmore", "XLA cannot compile the program: INTERNAL: other"),
    ],
)
def test_compile_errors_of_xla_are_reported_in_one_line(
    error, says, capsys, monkeypatch
):
    def compile(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    assert inspect("lowered") == 2
    assert capsys.readouterr().err == f"pipejax: {says}\n"


def test_missing_wheels_are_reported_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr("pipejax.overlap._topology._exists", lambda module: False)
    assert inspect("step", "--target", "h100:1x1x8") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipejax: ")
    assert "jax_plugins.xla_cuda12 and nvidia.cuda_nvcc must be installed" in line


def test_mistake_in_user_code_keeps_its_traceback():
    with pytest.raises(ValueError, match="a mistake of one's own"):
        inspect("buggy")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        main(["inspect", "cli_broken:step"])


def test_hint_is_printed_on_one_device(folder):
    done = subprocess.run(
        [sys.executable, "-m", "pipejax.cli", "inspect", "cli_programs.py:step"],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "target: here, 1 x cpu" in done.stdout
    assert "JAX_NUM_CPU_DEVICES=8 in the environment makes\neight" in done.stdout


def test_hint_is_left_out_on_several_devices(capsys):
    assert inspect("any_program") == 0
    assert "JAX_NUM_CPU_DEVICES" not in capsys.readouterr().out


def test_program_file_in_another_folder_is_found(folder, monkeypatch, capsys):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert main(["inspect", "../cli_programs.py:step"]) == 0
    assert "pipelined (K=2)" in capsys.readouterr().out


def test_inspect_help_is_printed_by_python_m():
    done = subprocess.run(
        [sys.executable, "-m", "pipejax.cli", "inspect", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "MODULE:FUNCTION" in done.stdout


def test_inspect_compiles_for_absent_gpus(capsys):
    pytest.importorskip("jax_plugins.xla_cuda12")
    pytest.importorskip("nvidia.cuda_nvcc")
    flags = ("--target", "h100:1x1x8", "--fail-under", "0.9")
    assert inspect("step", *flags) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("target: h100:1x1x8, 8 x NVIDIA H100")
    assert "pipelined (K=2): covered 1.00, share 1.00" in printed
    assert inspect("synchronous", *flags) == 1


def test_sharded_model_and_twin_are_shown_with_their_axes(capsys):
    """On CPUs nothing runs during the exchange, which is over the axis `host`."""
    assert inspect("sharded", "--twin") == 0
    out = capsys.readouterr().out
    assert re.search(r"all-reduce +f32 +2 +host ", out)
    assert re.search(r"all-\w+ +f32 +4 +fsdp ", out)
    assert "over host: under at least one 0.00" in out
    assert "\ncollectives inside groups: D-Sync (K=1), pipelined (K=2)\n" in out
    assert " over fsdp: " in out
    assert "MORE" not in out
    assert inspect("sharded", "--fail-under", "0.5") == 1
    assert inspect("step", "--twin") == 0
    assert "collectives inside groups" in (out := capsys.readouterr().out)
    assert out.rstrip().endswith("none")
    assert inspect("no_matmul", "--twin") == 2
    assert (
        "`--twin` must be used with a pipelined train step" in capsys.readouterr().err
    )


def test_local_step_is_shown_with_a_chunk_and_a_command_for_plan(capsys):
    assert inspect("in_rounds", "--fail-under", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "executor: fused (one process on CPU, with no network to wait for)",
        "compiler options: none",
        "dropped: none",
    ]
    assert lines[5] == "local step (H=8, V=4)"
    assert lines[-2].startswith("local step (H=8, V=4): covered 0.00, share 0.00, coll")
    command = lines[-1].partition(": ")[2]
    assert command == (
        "pipejax plan --hosts N --bandwidth RATE --parameters 65536 --compute-ms MS"
        " --batch 8 --local-steps --one-core"
    )
    for name, value in {"N": "4", "RATE": "1gbit", "MS": "250"}.items():
        command = command.replace(f" {name} ", f" {value} ")
    assert main(shlex.split(command)[1:]) == 0


def test_json_file_holds_the_chunk_of_a_local_step(folder):
    assert inspect("in_rounds", "--json", "report.json") == 0
    found = json.loads((folder / "report.json").read_text())["programs"]
    (collective,) = found["local step (H=8, V=4)"]["collectives"]
    assert collective["bytes"] == 4 * 256 * 256 / 4


@pytest.mark.parametrize(
    ("function", "title"),
    [
        ("in_rounds_at_once", "local step (H=8, V=0), without its exchange"),
        ("in_rounds_on_a_thread", "local step (H=8, V=4)"),
    ],
)
def test_local_step_without_exchange_in_its_program_is_shown(function, title, capsys):
    assert inspect(function) == 0
    out = capsys.readouterr().out
    assert f"\n{title}\n" in out
    assert "no collectives" in out
    assert ("dropped" in out) == (function == "in_rounds_at_once")


def test_exchange_between_groups_of_local_steps_counts_by_default(capsys):
    assert inspect("in_rounds_of_groups", "--fail-under", "0.5") == 1
    printed, complaint = capsys.readouterr()
    assert re.search(r"all-reduce +f32 +2 +host ", printed)
    assert "under at least one collective along host: 0.00, less than 0.5" in complaint
    assert inspect("in_rounds_of_groups", "--twin") == 2
    assert (
        "`--twin` must be used with a pipelined train step" in capsys.readouterr().err
    )


def test_local_step_with_the_state_of_a_pipeline_is_refused(capsys):
    assert inspect("of_two_kinds") == 2
    said = capsys.readouterr().err
    assert "must return (train, state, batch), with the state that train.init" in said
    assert "got (LocalTrainStep, PipelineState, ShapeDtypeStruct)" in said


def test_named_axes_count_alone_and_the_exchange_by_any_of_its_axes():
    """Sums of a group that are hidden do not hide those between groups."""
    hidden = {("host", "fsdp"): 0.0, ("fsdp",): 0.97}
    report = types.SimpleNamespace(covered_by=hidden, covered=0.97)
    share, said = _inspect._judged(report, ("host", "fsdp"), None)
    assert (share, said.rpartition(" ")[2]) == (0.0, "host+fsdp")
    assert _inspect._judged(report, None, None)[0] == 0.97
    assert _inspect._covered(report, ("host", "fsdp")) == 0.97
