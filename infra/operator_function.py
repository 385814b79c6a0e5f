"""The way in for operators on AWS: a Lambda function that runs one of their commands on the cache.

    {"arguments": ["keys", "create", "--tenant", "acme"]}

Whoever may invoke it is an operator. What the command prints, a new API key among it, goes to the
caller alone and into no log.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from contract.connection import redis_url_of
from contract.errors import BatchwayError
from gateway.aws.environment import SECRETS_VARIABLE, read_secrets
from infra.callbacks_command import add_callbacks_options, run_callbacks_command
from infra.check_command import add_check_options, run_check
from infra.drain_command import add_drain_options, run_drain
from infra.jobs_command import add_jobs_options, run_jobs
from infra.keys_command import add_keys_options, run_keys
from infra.lanes_command import add_lanes_options, run_lanes
from infra.preconditions import UsageError

EXIT_USAGE = 2
_Add = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace, str], int]
COMMANDS: Mapping[str, tuple[_Add, _Run]] = {
    "keys": (add_keys_options, run_keys),
    "jobs": (add_jobs_options, run_jobs),
    "lanes": (add_lanes_options, run_lanes),
    "drain": (add_drain_options, run_drain),
    "check": (add_check_options, run_check),
    "callbacks": (add_callbacks_options, run_callbacks_command),
}


def handler(event: Mapping[str, Any], _context: Any) -> dict[str, Any]:
    """The entry point of OperatorFunction; returns the exit status and what was printed."""
    os.environ.update(read_secrets(os.environ[SECRETS_VARIABLE].split(",")))
    output, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
        status = _run(event.get("arguments"))
    return {"status": status, "output": output.getvalue(), "messages": messages.getvalue()}


def _run(arguments: Any) -> int:
    if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
        return _refused("`arguments` must be a list of strings")
    parser = argparse.ArgumentParser(prog="batchway")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (add, _) in COMMANDS.items():
        add(commands.add_parser(name))
    try:
        options = parser.parse_args(arguments)
    except SystemExit as exc:  # argparse has printed why
        return exc.code if isinstance(exc.code, int) else EXIT_USAGE
    if options.command == "callbacks" and options.callbacks is None:
        return _refused("the service does not run here; `callbacks dead` does")
    _, run = COMMANDS[options.command]
    try:
        return run(options, redis_url_of(os.environ) or "")
    except (BatchwayError, UsageError, ValueError, argparse.ArgumentTypeError) as exc:
        return _refused(str(exc))


def _refused(reason: str) -> int:
    print(f"batchway: {reason}", file=sys.stderr)
    return EXIT_USAGE
