"""The commands of `batchway` and their options, as data."""

import argparse

from infra import cli

COMMANDS = ("up", "gateway", "worker")


def command_options(command: str) -> list[argparse.Action]:
    """All options of a command but `--help` and those for tests and children."""
    [commands] = [a for a in cli.build_parser()._actions if a.dest == "command"]
    assert isinstance(commands.choices, dict)
    return [
        action
        for action in commands.choices[command]._actions
        if action.dest != "help" and action.help != argparse.SUPPRESS
    ]
