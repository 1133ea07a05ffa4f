"""Recipes that start a job with other launchers, for `pipejax launch --print`."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence

from pipejax._internal import proofs

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A job for which a recipe is printed."""

    program: Sequence[str]
    hosts: int
    processes: int  # on each host
    gpus: int  # for each process, 0 for a job on CPUs
    max_restarts: int
    grace: float  # seconds for saving, from the notice that the job must end

    @property
    def options(self) -> tuple[str, ...]:
        grace = f"{self.grace:g}"
        return ("--max-restarts", str(self.max_restarts), "--grace", grace)

    @property
    def watched(self) -> str:
        # Without `--processes`, the place is that which another launcher has given.
        command = ("pipejax", "launch", *self.options, "--", *self.program)
        return shlex.join(command)


def slurm(recipe: Recipe) -> str:
    lines = [
        "#!/bin/bash",
        f"#SBATCH --nodes={recipe.hosts}",
        f"#SBATCH --ntasks-per-node={recipe.processes}",
        *_resources(recipe),
        "# Sends SIGTERM before the time is up:",
        f"#SBATCH --signal=TERM@{recipe.grace:.0f}",
        "#SBATCH --requeue",
        "",
        "# Other programs that connect to process 0 do not know this secret:",
        f"export {proofs.VARIABLE}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')",
        *(["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"] if recipe.gpus else []),
        f"srun {recipe.watched}",
    ]
    return "\n".join(lines) + "\n"


def _resources(recipe: Recipe) -> list[str]:
    """Returns the GPUs of a job, and cores beside the one that Slurm gives."""
    if not recipe.gpus:
        return []
    # A GPU that a process does not see cannot send to its GPU over NVLink.
    gpus = [f"#SBATCH --gpus-per-node={recipe.gpus * recipe.processes}"]
    if recipe.gpus > 1 and recipe.processes > 1:
        gpus = [f"#SBATCH --gpus-per-task={recipe.gpus}", "#SBATCH --gpu-bind=none"]
    return [*gpus, f"#SBATCH --cpus-per-task={4 * recipe.gpus}"]


def mpi(recipe: Recipe) -> str:
    """Returns a command for Open MPI, to be run once."""
    _check_one_gpu(recipe)
    count = recipe.hosts * recipe.processes
    hosts = "--hostfile hosts.txt " if recipe.hosts > 1 else ""
    place = f"--map-by ppr:{recipe.processes}:node --bind-to none"
    return f"mpirun -np {count} {hosts}{place} {recipe.watched}\n"


def torchrun(recipe: Recipe) -> str:
    """Returns a command for torchrun, to be run on each host."""
    _check_one_gpu(recipe)
    hosts = f"--nnodes {recipe.hosts} --nproc-per-node {recipe.processes}"
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST0:29500"
    if recipe.hosts == 1:
        meeting = "--standalone"
    return f"torchrun {hosts} {meeting} --no-python {recipe.watched}\n"


def _check_one_gpu(recipe: Recipe) -> None:
    # Open MPI and torchrun do not divide the GPUs of a host among the processes there.
    if recipe.gpus > 1 and recipe.processes > 1:
        raise ValueError(
            "`--gpus` must be 1 for each of several processes under Open MPI and"
            f" torchrun, which do not divide the GPUs of a host; got {recipe.gpus}."
            " Start one process on each host, or print another recipe."
        )


def kubernetes(recipe: Recipe) -> str:
    """Returns a Kubernetes JobSet (https://jobset.sigs.k8s.io), a pod for each host."""
    place = ("--processes", str(recipe.processes), "--hosts", str(recipe.hosts))
    # The name that a JobSet gives to its first pod, inside of the JobSet's network.
    coordinator = "train-hosts-0-0.train:29500"
    meeting = ("--host", "$(PIPEJAX_HOST)", "--coordinator", coordinator)
    command = ["pipejax", "launch", *place, *meeting, *recipe.options, "--"]
    # Kubernetes must not expand the dollars of the program's own arguments.
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


def ssh(recipe: Recipe) -> str:
    """Returns a script that starts the job on hosts which can be reached by ssh."""
    place = ("--hosts", str(recipe.hosts), "--processes", str(recipe.processes))
    # The script takes the names of the hosts as its arguments. On each host, it runs
    # the program in the folder with the path of the current one. If the job fails on
    # one host, the trap ends it on all of them.
    program = shlex.quote(shlex.join(recipe.program))
    return f"""\
#!/bin/bash
# bash job.sh HOST0 HOST1 ...; the first host is the coordinator
hosts=("$@")
if [ ${{#hosts[@]}} -ne {recipe.hosts} ]; then
  echo "give the names of {recipe.hosts} hosts"
  exit 2
fi
program={program}
trap 'kill $(jobs -p) 2>/dev/null' EXIT
for i in "${{!hosts[@]}}"; do
  place="--host $i --coordinator ${{hosts[0]}}:29500 {shlex.join(place)}"
  ssh -tt "${{hosts[i]}}" "cd $(printf %q "$PWD") && exec pipejax launch $place \
    {shlex.join(recipe.options)} -- $program" &
done
for _ in "${{hosts[@]}}"; do
  wait -n || exit $?
done
"""


BY_NAME: dict[str, Callable[[Recipe], str]] = {
    "slurm": slurm,
    "mpi": mpi,
    "torchrun": torchrun,
    "kubernetes": kubernetes,
    "ssh": ssh,
}
"""The recipes, by the names that `pipejax launch --print` takes."""
