"""Figures from the hosts of a cluster."""

import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from ._network import Network
from ._start import reason_why_not, start


def ask(
    network: Network, module: str, arguments: Sequence[str], log: IO[str] | None = None
) -> Any:
    """Runs a module of this project on every host, and returns what the first found.

    Args:
      network: the hosts.
      module: its name. It is given `--out`, where the first host is to write JSON.
      arguments: what else it is given.
      log: where their output goes; `None` is where this one's goes.

    Raises:
      SystemExit: where no cluster can be made, saying why.
      RuntimeError: if one of the hosts fails.
    """
    if why := reason_why_not():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, *arguments, "--out", str(out)]
        if code := start(network, command, log):
            raise RuntimeError(f"{module} ended with exit code {code} on the hosts.")
        return json.loads(out.read_text())
