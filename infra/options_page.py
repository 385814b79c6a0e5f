"""Writes docs/options.md: python -m infra.options_page > docs/options.md

The options of the command line and the settings of a gateway, as they are declared.
"""

import argparse
import re

from gateway.settings import GatewaySettings, variable
from infra.argparse_compat import commands_of, shown_options
from infra.parser import build_parser

_HEAD = """<!-- Written by `python -m infra.options_page`. Do not edit. -->
# Options

Every option and variable. [Configuration](configuration.md) explains those that need it."""
_DEFAULT = re.compile(r"\s*\(default: (.*)\)$", re.DOTALL)


def page() -> str:
    """The text of the page, in Markdown."""
    parts = [_HEAD]
    for name, parser in commands_of(build_parser()):
        rows = [_option_row(action) for action in shown_options(parser)]
        parts += [f"## {name}", _table("option", rows)]
    rows = [_setting_row(name) for name in GatewaySettings.model_fields]
    parts += ["## Variables of a gateway", _table("variable", rows)]
    return "\n\n".join(parts) + "\n"


def _option_row(action: argparse.Action) -> tuple[str, str, str]:
    name = action.option_strings[-1]
    if isinstance(action.metavar, tuple):
        name += " " + " ".join(action.metavar)
    elif action.metavar:
        name += f" {action.metavar}"
    elif action.choices is not None:
        name += " " + "|".join(map(str, action.choices))
    meaning = (action.help or "").replace("%%", "%")
    found = _DEFAULT.search(meaning)
    return name, found[1] if found else "", _DEFAULT.sub("", meaning)


def _setting_row(name: str) -> tuple[str, str, str]:
    field = GatewaySettings.model_fields[name]
    default = "required" if field.is_required() else field.default
    if default in (None, "", ()):
        default = ""
    elif isinstance(default, float):
        default = f"{default:g}"
    return variable(name), str(default), field.description or ""


def _table(what: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| {what} | default | meaning |", "|---|---|---|"]
    for name, *cells in rows:
        shown = [cell.replace("|", "\\|") for cell in (f"`{name}`", *cells)]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
