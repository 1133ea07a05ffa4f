"""How a job is started by others: what `pipejax launch --print` prints."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A job, for whoever starts it.

    Attributes:
      program: what each process runs.
      hosts: how many.
      processes: of each host.
      gpus: of each process; 0 for a job on CPU.
      max_restarts: times that all are started again after a failure.
      grace: seconds to save, between the notice of an end and the end.
    """

    program: Sequence[str]
    hosts: int
    processes: int
    gpus: int
    max_restarts: int
    grace: float

    @property
    def options(self) -> tuple[str, ...]:
        """Of `pipejax launch`."""
        grace = f"{self.grace:g}"
        return ("--max-restarts", str(self.max_restarts), "--grace", grace)

    @property
    def watched(self) -> str:
        """The program under `pipejax launch`, which takes its place from around it."""
        command = ("pipejax", "launch", *self.options, "--", *self.program)
        return shlex.join(command)


def slurm(recipe: Recipe) -> str:
    """A batch script; `sbatch` takes it."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --nodes={recipe.hosts}",
        f"#SBATCH --ntasks-per-node={recipe.processes}",
        *([f"#SBATCH --gpus-per-task={recipe.gpus}"] if recipe.gpus else []),
        "# Before the time is up, and when the job must make room for another:",
        f"#SBATCH --signal=TERM@{recipe.grace:.0f}",
        "#SBATCH --requeue",
        "",
        f"srun {recipe.watched}",
    ]
    return "\n".join(lines) + "\n"


def mpi(recipe: Recipe) -> str:
    """A command of Open MPI."""
    _check_one_gpu(recipe)
    count = recipe.hosts * recipe.processes
    hosts = "--hostfile hosts.txt " if recipe.hosts > 1 else ""
    place = f"--map-by ppr:{recipe.processes}:node --bind-to none"
    return f"mpirun -np {count} {hosts}{place} {recipe.watched}\n"


def torchrun(recipe: Recipe) -> str:
    """A command for each host."""
    _check_one_gpu(recipe)
    hosts = f"--nnodes {recipe.hosts} --nproc-per-node {recipe.processes}"
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST0:29500"
    if recipe.hosts == 1:
        meeting = "--standalone"
    return f"torchrun {hosts} {meeting} --no-python {recipe.watched}\n"


def _check_one_gpu(recipe: Recipe) -> None:
    """Of a host with several processes these launchers share out nothing."""
    if recipe.gpus > 1 and recipe.processes > 1:
        raise ValueError(
            "`--gpus` must be 1 for each of several processes under Open MPI and"
            f" torchrun, which share out no GPUs; got {recipe.gpus}. Give one process"
            " all of its host, or print another recipe."
        )


def kubernetes(recipe: Recipe) -> str:
    """A JobSet, https://jobset.sigs.k8s.io; a pod is a host."""
    place = ("--processes", str(recipe.processes), "--hosts", str(recipe.hosts))
    # A JobSet names its pods so, and itself the network that they are in.
    meeting = (
        "--host",
        "$(PIPEJAX_HOST)",
        "--coordinator",
        "train-hosts-0-0.train:29500",
    )
    command = ["pipejax", "launch", *place, *meeting, *recipe.options, "--"]
    # A dollar of the program's own is not for Kubernetes to read.
    command += [each.replace("$", "$$") for each in recipe.program]
    gpus = recipe.processes * recipe.gpus
    limits = f'{{nvidia.com/gpu: "{gpus}"}}' if gpus else "{}"
    return f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: train
spec:
  failurePolicy:
    maxRestarts: {recipe.max_restarts}
  replicatedJobs:
  - name: hosts
    replicas: 1
    template:
      spec:
        parallelism: {recipe.hosts}
        completions: {recipe.hosts}
        completionMode: Indexed
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {recipe.grace:.0f}
            containers:
            - name: train
              image: IMAGE
              command: {json.dumps(command)}
              env:
              - name: PIPEJAX_HOST
                valueFrom:
                  fieldRef:
                    fieldPath: {_INDEX}
              ports:
              - containerPort: 29500
              resources:
                limits: {limits}
"""


BY_NAME: dict[str, Callable[[Recipe], str]] = {
    "slurm": slurm,
    "mpi": mpi,
    "torchrun": torchrun,
    "kubernetes": kubernetes,
}
