"""Tests recipes: Slurm, Open MPI and torchrun really, Kubernetes by its schema."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from pipejax.cli import main

from .helpers import free_port

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.launch.placed"]
APART = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# The folders of `pipejax` and torchrun.
PATH = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"


def needs(*tools):
    missing = [tool for tool in tools if shutil.which(tool, path=PATH) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)} here")


@pytest.fixture
def recipe(capsys):
    """Returns the output of `pipejax launch --print`, for two processes on the CPU."""

    def printed(name, *arguments, program=PROGRAM):
        command = ["launch", "--print", name, "--gpus", "0", *arguments]
        assert main([*command, "--", *program]) == 0
        return capsys.readouterr().out

    return printed


def said(command):
    """Returns the lines of two processes in the order of their ranks."""
    found = {name: value for name, value in os.environ.items() if "JAX_" not in name}
    environ = {
        **found,
        "JAX_PLATFORMS": "cpu",
        "PATH": PATH,
        # The tests run as root, with more processes than cores.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if " of " in line)


@needs("mpirun")
def test_open_mpi_recipe_starts_all_ranks(recipe):
    command = recipe("mpi", "--processes", "2")
    assert said(["sh", "-c", command]) == [
        "[0] Open MPI: 0 of 2",
        "[1] Open MPI: 1 of 2",
    ]


@pytest.mark.one_python
@needs("torchrun")
@pytest.mark.full
def test_torchrun_recipe_starts_all_ranks(recipe):
    command = recipe("torchrun", "--processes", "2")
    assert said(["sh", "-c", command]) == [
        "[0] torchrun: 0 of 2",
        "[1] torchrun: 1 of 2",
    ]


@pytest.mark.one_python
@needs("bash")
@pytest.mark.full
def test_ssh_recipe_starts_all_ranks(recipe, tmp_path, monkeypatch):
    """A stand-in for ssh runs on this machine what ssh should run on a host."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$1" = -tt ] && exec sh -c "$3"\n')
    ssh.chmod(0o755)
    monkeypatch.setitem(globals(), "PATH", f"{tmp_path}:{PATH}")
    script = recipe("ssh", "--processes", "1", "--hosts", "2")
    script = script.replace("29500", str(free_port()))
    hosts = ["127.0.0.1", "127.0.0.1"]
    assert said(["bash", "-c", script, "job.sh", *hosts]) == [
        "[0] JAX_NUM_PROCESSES: 0 of 2",
        "[1] JAX_NUM_PROCESSES: 1 of 2",
    ]


@needs("bash")
def test_ssh_recipe_refuses_too_few_hosts(recipe):
    script = recipe("ssh", "--processes", "1", "--hosts", "2")
    command = ["bash", "-c", script, "job.sh", "node0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "give the names of 2 hosts\n")


@needs("slurmctld", "slurmd", "srun", "unshare")
@pytest.mark.skipif(os.geteuid() != 0, reason="slurmctld must be started by root")
def test_slurm_recipe_starts_all_ranks(recipe, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(recipe("slurm", "--processes", "1", "--hosts", "2"))
    start = pathlib.Path(__file__).with_name("slurm.sh")
    assert said([*APART, "sh", str(start), str(tmp_path), str(script)]) == [
        "[0] Slurm: 0 of 2",
        "[1] Slurm: 1 of 2",
    ]


def only(required, **optional):
    """Returns the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": required | optional,
        "additionalProperties": False,
    }


def of_a_job_set():
    """
    Returns the schema of the used part of a JobSet, according to its definition.

    The template is that of a Job. The definition is in
    https://github.com/kubernetes-sigs/jobset, config/components/crd/bases, v1alpha2.
    """
    required = {"name": {"type": "string"}, "template": {"type": "object"}}
    hosts = only(required, replicas={"type": "integer"})
    spec = only(
        {"replicatedJobs": {"type": "array", "items": hosts}},
        failurePolicy=only({}, maxRestarts={"type": "integer"}),
    )
    return only(
        {
            "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
            "kind": {"const": "JobSet"},
            "metadata": only({"name": {"type": "string", "maxLength": 63}}),
            "spec": spec,
        }
    )


@pytest.mark.parametrize("gpus", ["0", "2"])
def test_kubernetes_recipe_is_valid_for_its_schemas(recipe, gpus):
    arguments = ("--processes", "4", "--hosts", "2", "--gpus", gpus)
    found = yaml.safe_load(recipe("kubernetes", *arguments))
    jsonschema.validate(found, of_a_job_set())
    (hosts,) = found["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train-hosts"}}
    job |= hosts["template"]
    kubernetes_validate.validate(job, "1.33", strict=True)
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError, match="completionsMode"):
        kubernetes_validate.validate(job, "1.33", strict=True)


def test_kubernetes_recipe_passes_place_and_program(recipe):
    arguments = ("--processes", "4", "--hosts", "2", "--gpus", "1", "--grace", "90")
    program = ["sh", "-c", 'echo "$(hostname)": 1']
    job = yaml.safe_load(recipe("kubernetes", *arguments, program=program))
    (hosts,) = job["spec"]["replicatedJobs"]
    spec = hosts["template"]["spec"]
    assert (spec["parallelism"], spec["completions"]) == (2, 2)
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 90
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    command = container["command"]
    assert command[:2] == ["pipejax", "launch"]
    # The name of a pod has the names of the set and its job, the job's number and its
    # own.
    name = f"{job['metadata']['name']}-{hosts['name']}-0-0.{job['metadata']['name']}"
    assert command[command.index("--coordinator") + 1].split(":") == [name, "29500"]
    # The variable of the recipe is replaced, and the text of the program is not.
    assert command[command.index("--host") + 1] == f"$({container['env'][0]['name']})"
    assert command[-1] == 'echo "$$(hostname)": 1'


@pytest.mark.parametrize("name", ["slurm", "mpi", "torchrun", "kubernetes"])
def test_launch_options_are_passed_on_in_recipes(recipe, name):
    text = recipe(name, "--processes", "2", "--max-restarts", "4", "--grace", "60")
    given = text.replace('", "', " ")  # JSON separates arguments in this way
    assert "--max-restarts 4 --grace 60 --" in given


@pytest.mark.parametrize("name", ["mpi", "torchrun"])
def test_several_gpus_for_several_processes_are_refused(capsys, name):
    command = ["launch", "--print", name, "--gpus", "2", "--processes"]
    assert main([*command, "2", "--", "true"]) == 2
    assert "`--gpus` must be 1 for each of several processes" in capsys.readouterr().err
    assert main([*command, "1", "--", "true"]) == 0


def test_processes_must_be_given_for_a_recipe(capsys):
    assert main(["launch", "--print", "slurm", "--", "true"]) == 2
    assert "`--processes` must be given with `--print`" in capsys.readouterr().err
