"""Makes the short tables of sharded models and optimizers."""

from experiments.report import result

_STEPS = {
    "D-Sync": "synchronous",
    "K=2": "pipelined",
    "K=2, int8": "pipelined, int8",
    "K=2, ZeRO-1": "pipelined, ZeRO-1",
}
_MEMORY = {
    "D-Sync": "K=1",
    "ZeRO-1": "K=1, sharded",
    "Pipe-SGD": "K=2, default",
    "Pipe-SGD, sharded": "K=2, sharded, predicted",
}


def hidden() -> list[list[str]]:
    """Returns the share of the FLOPs under the exchange between groups of GPUs."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for cell in result("sharded_compiled")["cells"]:
        if cell["target"].startswith("h100"):
            shares = found.setdefault((cell["size"], cell["target"]), {})
            shares[cell["step"]] = f"{cell['covered_between']:.2f}"
    return [
        ["parameters", "hosts x GPUs", *_STEPS.values()],
        *(
            [size, _hosts(target), *(shares[step] for step in _STEPS)]
            for (size, target), shares in found.items()
        ),
    ]


def memory() -> list[list[str]]:
    """Returns the memory of each model on a device, in copies of the parameters."""
    cells = result("memory")["cells"]
    live = {(cell["model"], cell["step"]): f"{cell['live']:.2f}" for cell in cells}
    models = dict.fromkeys(cell["model"] for cell in cells)
    rows = [[x, *(live[x, step] for step in _MEMORY.values())] for x in models]
    return [["model", *_MEMORY], *rows]


def _hosts(target: str) -> str:
    """Returns the hosts and the GPUs of each, of a target such as `h100:1x4x8`."""
    return " x ".join(target.partition(":")[2].split("x")[1:])
