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
from collections.abc import Mapping
from typing import Any

from contract.connection import redis_url_of
from contract.errors import BatchwayError, JobRefused
from gateway.aws.environment import SECRETS_VARIABLE, read_secrets
from infra.commands import COMMANDS
from infra.preconditions import Failed, UsageError

EXIT_FAILED, EXIT_USAGE = 1, 2
OPERATORS = ("keys", "jobs", "lanes", "drain", "check", "callbacks")


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
    for name in OPERATORS:
        COMMANDS[name].add_options(commands.add_parser(name))
    try:
        options = parser.parse_args(arguments)
    except SystemExit as exc:  # argparse has printed why
        return exc.code if isinstance(exc.code, int) else EXIT_USAGE
    if options.command == "callbacks" and options.callbacks is None:
        return _refused("the service does not run here; `callbacks dead` does")
    try:
        return COMMANDS[options.command].run(options, redis_url_of(os.environ) or "")
    except (Failed, JobRefused) as exc:
        print(f"batchway {options.command}: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except (BatchwayError, UsageError, ValueError, argparse.ArgumentTypeError) as exc:
        return _refused(str(exc))


def _refused(reason: str) -> int:
    print(f"batchway: {reason}", file=sys.stderr)
    return EXIT_USAGE
