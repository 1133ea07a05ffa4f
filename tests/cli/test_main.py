"""The command line as a whole."""

import jax
import pytest

import pipejax as pj
from pipejax.cli import main


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said == f"pipejax {pj.__version__}, JAX {jax.__version__}\n"
