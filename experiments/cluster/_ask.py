"""Gets figures from the hosts of a cluster."""

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
    """Runs a module of this project on every host; returns the first host's answer.

    Args:
      network: The hosts.
      module: The name of the module. It gets `--out FILE`, the file to which the first
        host must write its answer as JSON.
      arguments: The other arguments of the module.
      log: The file for the output of all hosts; `None` takes that of this process.

    Raises:
      SystemExit: If no cluster can be made here, with the reason.
      RuntimeError: If one of the hosts fails.
    """
    if why := reason_why_not():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, *arguments, "--out", str(out)]
        if code := start(network, command, log):
            raise RuntimeError(f"{module} ended with exit code {code} on the hosts.")
        return json.loads(out.read_text())
