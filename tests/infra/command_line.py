"""The commands of `batchway` and their options, as data."""

import argparse

from infra import cli
from infra.keys_command import ACTIONS

COMMANDS = ("up", "gateway", "worker", *(f"keys {action}" for action in ACTIONS))


def command_options(command: str) -> list[argparse.Action]:
    """All options of a command but `--help` and those for tests and children."""
    parser = cli.build_parser()
    for word in command.split():
        parser = _choices(parser)[word]
    return [
        action
        for action in parser._actions
        if action.dest != "help" and action.help != argparse.SUPPRESS and action.option_strings
    ]


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    choices: dict[str, argparse.ArgumentParser] = commands.choices
    return choices
