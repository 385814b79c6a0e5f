"""What argparse's manual does not tell: which options a parser has."""

import argparse
from collections.abc import Iterator


def shown_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All options of a command except `--help` and those for tests and child processes."""
    return [
        action
        for action in parser._actions
        if action.dest != "help" and action.help != argparse.SUPPRESS and action.option_strings
    ]


def commands_of(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands that have options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands_of(command)
            return
    if shown_options(parser):
        yield parser.prog, parser
