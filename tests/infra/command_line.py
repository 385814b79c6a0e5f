"""The commands of `batchway` and their options, as data."""

import argparse
import contextlib
import io
import os
import subprocess

from infra import callbacks_command, jobs_command, keys_command, lanes_command
from infra.argparse_compat import shown_options
from infra.cli import main
from infra.parser import build_parser

COMMANDS = (
    *("up", "gateway", "worker", "callbacks", "drain", "redis-roles", "top", "profile", "plan"),
    *("simulate", "record"),
    *("bench serve", "cascade fit", "compare"),
    *(f"callbacks dead {action}" for action in callbacks_command.ACTIONS),
    *(f"keys {action}" for action in keys_command.ACTIONS),
    *(f"jobs {action}" for action in jobs_command.JOB_ACTIONS),
    "jobs calibration",
    *(f"lanes {action}" for action in lanes_command.LANES_ACTIONS),
    "ab report",
    *(f"jobs quarantine {action}" for action in jobs_command.ACTIONS),
)


def command_options(command: str) -> list[argparse.Action]:
    parser = build_parser()
    for word in command.split():
        parser = _choices(parser)[word]
    return shown_options(parser)


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    choices: dict[str, argparse.ArgumentParser] = commands.choices
    return choices


def call_cli(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, without the caller's REDIS_URL: what works on Redis, or is
    refused before anything starts."""
    before, out, err = dict(os.environ), io.StringIO(), io.StringIO()
    os.environ.pop("REDIS_URL", None)
    os.environ.update(environ)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
