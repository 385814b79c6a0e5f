"""The commands of `batchway` and their options, as data."""

import argparse

from infra import callbacks_command, jobs_command, keys_command, lanes_command
from infra.argparse_compat import shown_options
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
