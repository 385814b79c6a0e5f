"""The tables of decisions and the walks find mistakes in the functions."""

import subprocess
import sys

import pytest

from tests.oracle.mutation import KNOWN, LUA, mutants


@pytest.mark.campaign
def test_a_sample_of_mutants_is_found() -> None:
    """One of a hundred; `python -m tests.oracle.mutation` takes all."""
    command = (sys.executable, "-m", "tests.oracle.mutation", "--of", "100")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_mutants_that_may_stay_can_be_made() -> None:
    found = {(m.file, m.text, m.change) for path in LUA.glob("*.lua") for m in mutants(path)}
    assert KNOWN.keys() <= found, KNOWN.keys() - found
