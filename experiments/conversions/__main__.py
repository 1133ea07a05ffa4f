"""Runs public training programs beside the same programs converted to pipejax.

Claim: at width 1, the converted program takes the steps of the original, and at width 2
with a plain delay those of a loop by hand that applies each gradient of the original
one step late. Parameters differ by no more than what rounding each of them once, at the
start, leads to, and losses and metrics by no more than three times as much, or two
units in their last place. The result lists the lines that a conversion adds or changes,
and what it loses.

Nothing of the programs is kept here. Their functions are imported from clones, or cut
out of them while this runs. Four CPU devices train tiny configurations for 20 steps.
Data is random, except for jaxpi's equation and Diffrax' oscillators, because their
programs make it. Loggers, data loaders and environments are replaced by empty stubs.

Two things are arranged so that both loops draw the same numbers: the keys of the
devices travel in the batch, where the program has one for each, and randomness is off
where the program draws it for the whole batch at once. The result says which.

The clones, in one folder, and the commits that the result was made with:

  git clone https://github.com/jenkspt/gpt-jax                          f22a46e
  git clone https://github.com/google-research/big_vision               0127fb6
  git clone https://github.com/google/flax                              18f8f31
  git clone https://github.com/bkkaggle/jax-gans                        551df98
  git clone https://github.com/vwxyzjn/cleanrl                          fe8d8a0
  git clone https://github.com/yiyixuxu/denoising-diffusion-flax        d09e271
  git clone https://github.com/PredictiveIntelligenceLab/jaxpi          e85b694
  git clone https://github.com/patrick-kidger/diffrax                   5ea5fcb
  git clone https://github.com/luchris429/purejaxrl                     31756b1
  git clone https://github.com/google-deepmind/nanodo                   10aefde
  git clone https://github.com/stanford-crfm/levanter                   9263f81

Command: pip install --no-deps clu==0.0.12 diffrax==0.7.2 equinox==0.13.8
  jraph==0.0.6.dev0 lineax==0.1.1 ml_collections==1.1.0 optimistix==0.1.0,
  for purejaxrl cloudpickle==3.1.3 decorator==5.3.1 distrax==0.1.9 dm-tree==0.1.10
  farama-notifications==0.0.6 gymnasium==1.4.0 gymnax==0.0.9
  tfp-nightly==0.26.0.dev20261027,
  for levanter aqtp==0.9.0 braceexpand==0.1.7 cachebox==6.2.10 deepdiff==9.1.0
  draccus==0.11.6 haliax==1.4.dev453 huggingface-hub==0.36.2 humanfriendly==10.0
  jmp==0.0.4 lenses==1.2.0 mergedeep==1.3.4 orderly-set==5.5.0 pytimeparse==1.1.10
  pyyaml-include==2.2 safetensors==0.6.2 tblib==3.2.2 tokenizers==0.22.2 toml==0.10.2
  tqdm-loggable==0.4.1 transformers==4.57.1 dataclasses-json==0.6.7 fsspec==2026.9.0,
  and
  python -m experiments.conversions --sources DIR, with --programs for some of them
Time: about 25 minutes on 2 cores that have nothing else to do.
Result: experiments/results/conversions.json, where programs that do not run stay
"""

import dataclasses
import importlib
import json
import pathlib
import subprocess
from typing import Any

import jax
import tyro

from experiments import report

from ._compare import compared
from ._loops import DEVICES
from ._table import programs

PROGRAMS = {
    "gpt-jax: GPT-2": "_gpt_jax",
    "big_vision: ViT, mixup": "_big_vision",
    "Flax: ogbg_molpcba": "_ogbg",
    "jax-gans: DCGAN": "_dcgan",
    "CleanRL: TD3": "_td3",
    "denoising-diffusion-flax": "_diffusion",
    "jaxpi: Allen-Cahn": "_allen_cahn",
    "Diffrax: neural ODE": "_neural_ode",
    "Flax: Gemma, 2 hosts x 2 fsdp": "_gemma",
    "Flax: Gemma, 2 fsdp x 2 tensor": "_gemma_tensor",
    "purejaxrl: PPO": "_ppo",
    "big_vision: SigLIP": "_siglip",
    "nanodo: GPT, MultiSteps": "_nanodo",
    "levanter: GPT-2": "_levanter",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    sources: pathlib.Path
    """The folder with the clones."""
    programs: tuple[str, ...] = tuple(PROGRAMS)
    """The names of the programs to train."""
    steps: int = 20
    """The number of steps."""
    seed: int = 0
    """The seed of the parameters, the data and the disturbance."""
    out: pathlib.Path = report.RESULTS / "conversions.json"
    """The file that the result is written to."""


def main(config: Config) -> dict[str, Any]:
    """Trains all programs, then prints and saves the differences."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found = {}
    for name in config.programs:
        module = importlib.import_module(f".{PROGRAMS[name]}", __package__)
        program = module.program(config.sources, config.steps, config.seed)
        found[name] = {
            "source": _commit(config.sources / module.FOLDER),
            **compared(program, config.seed),
            **module.CONVERSION._asdict(),
        }
        print(name, flush=True)
    settings = {"devices": DEVICES, "steps": config.steps}
    every = {**_kept(config.out), **found}
    ordered = {name: every[name] for name in PROGRAMS if name in every}
    report.save(config.out, seed=config.seed, **settings, programs=ordered)
    report.console(width=160).print(
        report.table("largest difference / rounding alone", programs(found))
    )
    return found


def _kept(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the programs of an existing result, each with its own origin."""
    record = json.loads(path.read_text()) if path.exists() else {"programs": {}}
    of_file = {name: record[name] for name in report.origin() if name in record}
    return {name: {**of_file, **row} for name, row in record["programs"].items()}


def _commit(clone: pathlib.Path) -> str:
    """Returns the name and the commit of a clone."""
    git = ["git", "-C", str(clone), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=True)
    return f"{clone.name} {done.stdout.strip()}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
