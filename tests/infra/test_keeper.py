"""How often a part is restarted, how a child's output is shown, and how children end."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TextIO

import pytest

from infra.child import (
    LIFELINE_VARIABLE,
    Child,
    Console,
    PartEnded,
    Restarts,
    describe_status,
    keep_running,
    lifeline,
)

pytestmark = pytest.mark.anyio


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def child_of(program: str, output: TextIO, *, pass_fds: Sequence[int] = ()) -> Child:
    """A child that runs a line of Python and writes to `output`."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if pass_fds:
        environ[LIFELINE_VARIABLE] = str(pass_fds[0])
    command = [sys.executable, "-c", program]
    return Child("part", command, environ, Console(output, {}), pass_fds=pass_fds)


def test_pauses_between_restarts_grow_until_the_last() -> None:
    """A long run begins them anew."""
    restarts = Restarts()
    pauses = [restarts.next_pause_s(lived_s=1.0) for _ in range(6)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert restarts.next_pause_s(lived_s=61.0) == 0.5


@pytest.mark.parametrize(
    ("status", "words"),
    [(1, "exit status 1"), (-9, "signal SIGKILL"), (-200, "signal 200")],
)
def test_an_exit_status_is_described(status: int, words: str) -> None:
    assert describe_status(status) == words


@pytest.mark.parametrize("status", [2, 3])
async def test_permanent_failures_are_not_retried(status: int) -> None:
    """Wrong options, and a model that the worker rejects."""
    output = io.StringIO()
    child = child_of(f"raise SystemExit({status})", output)
    with pytest.raises(PartEnded, match=rf"part cannot run \(exit status {status}\)"):
        await keep_running(child, Console(output, {}))


def test_tries_of_a_part_that_was_given_up_grow_to_five_minutes() -> None:
    """Each a fifth shorter or longer, by the drawn number; a long run begins them anew."""
    for draw, factor in ((0.0, 0.8), (0.5, 1.0), (1.0, 1.2)):
        restarts = Restarts(lambda draw=draw: draw)  # type: ignore[misc]
        tries = [restarts.next_try_s() for _ in range(7)]
        assert tries == pytest.approx([s * factor for s in (15, 30, 60, 120, 300, 300, 300)])
        restarts.next_pause_s(lived_s=60.0)
        assert restarts.next_try_s() == pytest.approx(15 * factor)


class Stopped(Exception):
    pass


async def pauses_of(
    program: str, num_pauses: int, *, lived_s: float = 0.0
) -> tuple[list[float], list[tuple[str, float]]]:
    """The pauses of a part that others can do without, and what was told when it was given up. By
    the clock, each of its lives lasts for `lived_s`."""
    output, pauses, told, now_s = io.StringIO(), list[float](), list[tuple[str, float]](), 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += lived_s
        return now_s

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == num_pauses:
            raise Stopped

    async def give_up(reason: str, retry_in_s: float) -> None:
        told.append((reason, retry_in_s))

    async def announce(starts_in_s: float) -> None:
        pass

    child, console = child_of(program, output), Console(output, {})
    restarts = Restarts(lambda: 0.5)
    with pytest.raises(Stopped):
        await keep_running(child, console, announce, give_up, restarts, clock=clock, sleep=sleep)
    return pauses, told


@pytest.mark.parametrize(
    ("program", "lived_s", "pauses", "reason"),
    [
        (
            "print('no memory'); print(); raise SystemExit(1)",
            0.0,
            [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0],
            "exit status 1: no memory",
        ),
        ("raise SystemExit(3)", 0.0, [15.0, 30.0, 60.0], "exit status 3"),
        ("raise SystemExit(1)", 61.0, [0.5] * 8, ""),
    ],
    ids=["dies again and again", "is refused", "lives long"],
)
async def test_a_part_is_given_up_and_tried_for_ever(
    program: str, lived_s: float, pauses: list[float], reason: str
) -> None:
    """After five quick failures, or one refusal, whose cause may pass; with the last words of each
    life. One that lives long is not given up, however often it ends."""
    found, told = await pauses_of(program, len(pauses), lived_s=lived_s)
    assert found == pauses
    assert told == [(reason, pause_s) for pause_s in pauses if pause_s >= 15.0]


async def test_each_start_is_announced() -> None:
    """The first at once, the second with the pause before it."""
    output, announced = io.StringIO(), asyncio.Queue[float]()
    keeping = asyncio.create_task(
        keep_running(child_of("raise SystemExit(1)", output), Console(output, {}), announced.put)
    )
    assert [await announced.get() for _ in range(2)] == [0.0, 0.5]
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_every_line_of_a_child_has_its_name() -> None:
    """Also long lines, malformed characters and a last line without a line end."""
    output = io.StringIO()
    program = "import os; os.write(1, b'one\\n'); os.write(2, b'x' * 200_000 + b'\\n\\xff end')"
    child = child_of(program, output)
    child.start()
    assert await child.wait() == 0
    assert output.getvalue().splitlines() == [
        "part     | one",
        "part     | " + "x" * 200_000,
        "part     | \ufffd end",
    ]


async def test_a_child_that_ignores_the_signal_is_killed() -> None:
    """After its drain budget. The kill is logged."""
    output = io.StringIO()
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); time.sleep(600)"
    )
    child = child_of(program, output)
    child.start()
    async with asyncio.timeout(60):
        while "deaf" not in output.getvalue():  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(0.01)
    await child.stop(budget_s=0.2)
    assert await child.wait() == -signal.SIGKILL
    assert "part did not end in 0 s: killed" in output.getvalue()


async def test_a_child_ends_when_its_lifeline_is_cut() -> None:
    program = (
        "import signal, time; from infra.child import end_with_parent; "
        "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); "
        "end_with_parent(grace_s=0.1); time.sleep(600)"
    )
    output = io.StringIO()
    with lifeline() as fd:
        child = child_of(program, output, pass_fds=[fd])
        child.start()
    assert await child.wait() == -signal.SIGKILL
    assert output.getvalue() == "part     | told\n"


def test_only_terminals_get_colour() -> None:
    """And only if NO_COLOR is not set."""
    for stream, environ, is_coloured in (
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (io.StringIO(), {}, False),
    ):
        Console(stream, environ).line("part", "text")
        assert ("\x1b[" in stream.getvalue()) is is_coloured
        assert stream.getvalue().endswith(" text\n")


def test_a_closed_output_pipe_stops_nothing() -> None:
    """`batchway up | head` continues to serve."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; from infra.child import Console\n"
            "read_fd, write_fd = os.pipe(); os.close(read_fd)\n"
            "console = Console(os.fdopen(write_fd, 'w'), {})\n"
            "console.line('a', 'b'); console.line('a', 'c'); print('still here', flush=True)\n"
            "os._exit(0)",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "still here\n"
