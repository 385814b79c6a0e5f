"""Inspects real processes, and waits for their actions."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Returns once the condition holds; fails the test after a timeout."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not so within {timeout_s:.0f} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    return any_alive([pid])


def any_alive(pids: Collection[int]) -> bool:
    """Whether one of them runs, by one scan of the process table."""
    table = _table()
    return any(table.get(pid, (0, "Z"))[1][0] != "Z" for pid in pids)


def descendants(pid: int) -> list[int]:
    """Ids of all processes below one."""
    table = _table()
    found = [pid]
    for parent in found:
        found += [child for child, (its_parent, _) in table.items() if its_parent == parent]
    return found[1:]


def command_of(pid: int) -> str:
    """The command line of a process, '' if there is none."""
    return _ps("-ww", "-o", "args=", "-p", str(pid)).strip()


def _table() -> dict[int, tuple[int, str]]:
    """Parent and state of every process."""
    rows = (line.split() for line in _ps("-A", "-o", "pid=,ppid=,stat=").splitlines())
    return {int(pid): (int(parent), state) for pid, parent, state in rows}


def _ps(*arguments: str) -> str:
    return subprocess.run(["ps", *arguments], capture_output=True, text=True).stdout


def check_ctrl_c(module: str, option: str, announces: str, num_children: int) -> None:
    """Interrupts a run once it prints `announces`. Its exit status must be 130, and no process
    may remain."""
    run = subprocess.Popen(
        [sys.executable, "-m", module, option],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stderr is not None
    with run.stderr as errors:
        lines = iter(errors.readline, "")
        assert any(announces in line for line in lines)
        children = descendants(run.pid)
        assert len(children) >= num_children

        run.send_signal(signal.SIGINT)

        assert "interrupted" in "".join(lines)
    assert run.wait(timeout=60) == 130
    wait_until(lambda: not any_alive(children))
