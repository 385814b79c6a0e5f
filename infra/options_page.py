"""Writes pages of the documents: python -m infra.options_page PAGE > docs/…, where PAGE is
options (options.md), fields (api-fields.md) or metrics (metric-names.md).

The options of the command line, the settings of a gateway and the metrics, as they are declared;
the fields of request bodies, as the OpenAPI document has them.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from typing import Any

from contract.telemetry.metrics import Source, of_sources
from gateway.app import create_app
from gateway.settings import GatewaySettings, variable
from infra.argparse_compat import commands_of, shown_options
from infra.parser import build_parser

_HEAD = """<!-- Written by `python -m infra.options_page options`. Do not edit. -->
# Options

Every option and variable, each once: first those of several commands. \
[Configuration](configuration.md) explains those that need it."""
_HEAD_OF_FIELDS = """<!-- Written by `python -m infra.options_page fields`. Do not edit. -->
# Paths and fields

Paths and the fields of bodies, as in `GET /openapi.json`; [HTTP API](api.md) tells more. Fields \
in **bold** are required, others may be null. A boolean is false unless its default is given. \
Brackets name the calls that have a field, where not all of a table do."""
_HEAD_OF_METRICS = """<!-- Written by `python -m infra.options_page metrics`. Do not edit. -->
# Metrics

All metrics of Prometheus; [Observing](metrics.md) tells what to look at."""
_SOURCES = {
    "Jobs": (Source.JOBS, "Counted in Redis; the same on every gateway's page."),
    "Engines": (
        Source.ENGINES,
        "Counted by workers. A gateway's page sums their last heartbeats (every 2.5 s).",
    ),
    "The fleet": (Source.FLEET, "As it is now; the same on every gateway's page."),
    "One gateway": (Source.GATEWAY, "Counted by the gateway itself."),
}
_DEFAULT = re.compile(r"\s*\(default: (.*)\)$", re.DOTALL)

_TEXT = ("ChatBody", "CompletionBody", "ResponseBody")
_VECTORS = ("EmbeddingsBody", "RerankBody", "ScoreBody", "ClassifyBody")
# A field of a call is in the last table that has all calls with it.
_CALLS = {
    "All calls": (*_TEXT, *_VECTORS),
    "Chat, completions and responses": _TEXT,
    "Chat and completions": _TEXT[:2],
    "Responses": _TEXT[2:],
    "Vectors": _VECTORS,
}
_OTHERS = {
    "Messages": "MessagesBody",
    "Jobs and quotes": "ChatJob",
    "Changes of a job": "JobChange",
    "Cancels by filter": "CancelBody",
    "Replays by filter": "ReplayBody",
    "Replays of callbacks by filter": "CallbacksBody",
    "Pauses": "PauseBody",
    "Callbacks": "CallbackBody",
    "Batches": "BatchBody",
    "Uploads": "UploadBody",
}
_MAX_NAMES = 9  # of fields of an object in a cell
_HUGE = 2**31 - 1  # from here on, a bound says only that a number has 32 or 64 bits

Row = tuple[str, str, str]


def options() -> str:
    """The text of docs/options.md."""
    commands = dict(commands_of(build_parser()))
    rows_of: dict[str, dict[str, Row]] = {}  # by option, by command
    for command, parser in commands.items():
        for action in shown_options(parser):
            name = command.removeprefix("batchway ")
            rows_of.setdefault(action.option_strings[-1], {})[name] = _option_row(action)
    parts, order = [_HEAD], list(commands)
    shared = {option: rows for option, rows in rows_of.items() if len(rows) > 1}
    rows = [_shared_row(rows) for rows in shared.values()]
    parts += ["## Options of several commands", _table("option | default", rows)]
    for command in order:
        name = command.removeprefix("batchway ")
        found = [(option, rows[name]) for option, rows in rows_of.items() if name in rows]
        own = [row for option, row in found if option not in shared]
        others = [f"`{option}`" for option, _ in found if option in shared]
        parts.append(f"## {command}")
        parts += [_table("option | default", own)] if own else []
        parts += [("And " if own else "") + ", ".join(others) + "."] if others else []
    rows = [_setting_row(name) for name in GatewaySettings.model_fields]
    parts += ["## Variables of a gateway", _table("variable | default", rows)]
    return "\n\n".join(parts) + "\n"


def _shared_row(rows: dict[str, Row]) -> Row:
    """The rows of several commands as one: where they differ, each value with its commands."""
    names, defaults, meanings = (
        dict.fromkeys(row[cell] for row in rows.values()) for cell in range(3)
    )
    return next(iter(names)), _by_command(rows, 1, defaults), _by_command(rows, 2, meanings)


def _by_command(rows: dict[str, Row], cell: int, values: Iterable[str]) -> str:
    found = {
        value: [command for command, row in rows.items() if row[cell] == value] for value in values
    }
    if len(found) == 1:
        return next(iter(found))
    *first, last = sorted(found, key=lambda value: len(found[value]))
    parts = [f"{', '.join(found[value])}: {value or 'none'}" for value in first]
    return "; ".join([*parts, f"others: {last or 'none'}"])


def fields() -> str:
    """The text of docs/api-fields.md."""
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1"))  # connects later
    document = app.openapi()
    schemas = document["components"]["schemas"]
    paths = schemas["BatchBody"]["properties"]["endpoint"]["enum"]
    schemas["ChatJob"]["properties"]["endpoint"]["enum"] = paths  # of all kinds of jobs
    calls_with: dict[Row, list[str]] = {}
    for body in _CALLS["All calls"]:
        for row in _field_rows(body, schemas):
            calls_with.setdefault(row, []).append(body)
    tables: dict[str, list[Row]] = {title: [] for title in _CALLS}
    for (name, values, meaning), calls in calls_with.items():
        title = [title for title, bodies in _CALLS.items() if {*calls} <= {*bodies}][-1]
        tables[title].append((name + _brackets(calls, _CALLS[title]), values, meaning))
    tables |= {title: _field_rows(body, schemas) for title, body in _OTHERS.items()}
    paths = _table("path | parameters", _path_rows(document["paths"]))
    parts = [_HEAD_OF_FIELDS, f"## Paths\n\n{paths}"]
    for title, rows in tables.items():
        rows.sort(key=lambda row: not row[0].startswith("**"))
        parts += [f"## {title}", _table("field | values", rows)]
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """The text of docs/metric-names.md."""
    parts = [_HEAD_OF_METRICS]
    for title, (source, about) in _SOURCES.items():
        lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
        for metric in of_sources(source):
            labels = ", ".join(f"`{label}`" for label in metric.all_labels)
            lines.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |")
        parts += [f"## {title}", about, "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _brackets(calls: list[str], bodies: tuple[str, ...]) -> str:
    others = [body for body in bodies if body not in calls]
    named, no = (calls, "") if len(calls) <= len(others) else (others, "not ")
    names = ", ".join(body.removesuffix("Body").lower() for body in named)
    return f" ({no}{names})" if others else ""


def _path_rows(paths: dict[str, Any]) -> list[Row]:
    rows = []
    for path, operations in paths.items():
        for method, operation in operations.items():
            params = operation.get("parameters", ())
            names = ", ".join(f"`{param['name']}`" for param in params if param["in"] == "query")
            meaning = " ".join(operation["description"].split())
            rows.append((f"`{method.upper()} {path}`", names, meaning))
    return rows


def _field_rows(body: str, schemas: dict[str, Any]) -> list[Row]:
    rows = []
    for name, field in schemas[body]["properties"].items():
        mark = "**" if name in schemas[body].get("required", ()) else ""
        rows.append((f"{mark}`{name}`{mark}", _values(field, schemas), field["description"]))
    return rows


def _values(field: dict[str, Any], schemas: dict[str, Any], s: str = "") -> str:
    """What a schema permits, in words; `s` makes a plural of what stands in a list."""
    field = schemas[field["$ref"].rpartition("/")[2]] if "$ref" in field else field
    if kinds := field.get("anyOf") or field.get("oneOf"):
        words = [_values(each, schemas, s) for each in kinds if each.get("type") != "null"]
        return (" or " if s else "; ").join(words)
    if named := field.get("enum") or ([field["const"]] if "const" in field else ()):
        *first, last = (f"`{name}`" for name in named)
        return f"{', '.join(first)} or {last}" if first else last
    kind, size = field["type"].replace("array", "list") + s, _size(field)
    if size == " of 1 or more":
        kind, size = f"non-empty {kind}", ""
    items = field.get("items") or field.get("additionalProperties")
    if isinstance(items, dict):
        return f"{kind}{size or ' of'} {_values(items, schemas, 's')}"
    if names := ", ".join(f"`{name}`" for name in field.get("properties", ())):
        return f"{kind} ({names})" if names.count(",") < _MAX_NAMES else kind
    unit = {"string": " characters", "object": " fields"}.get(field["type"], "")
    return f"{kind}{size}{unit if size else ''}"


def _size(field: dict[str, Any]) -> str:
    """The bounds of a number or of a length, in words."""
    bounds = {
        name[:3]: f"{bound:,.15g}"
        for name, bound in field.items()
        if name.startswith(("min", "max", "exclusiveMin")) and abs(bound) < _HUGE
    }
    low, high = bounds.get("min"), bounds.get("max")
    if "exc" in bounds:
        low = f"over {bounds['exc']}"
    is_number = field["type"] in ("integer", "number")
    if low and high:
        return (", " if is_number else " of ") + (low if low == high else f"{low} to {high}")
    if low:
        return f" from {low}" if is_number else f" of {low} or more"
    return f" of at most {high}" if high else ""


def _option_row(action: argparse.Action) -> Row:
    name = action.option_strings[-1]
    if isinstance(action.metavar, tuple):
        name += " " + " ".join(action.metavar)
    elif action.metavar:
        name += f" {action.metavar}"
    elif action.choices is not None:
        name += " " + "|".join(map(str, action.choices))
    meaning = (action.help or "").replace("%%", "%")
    found = _DEFAULT.search(meaning)
    return f"`{name}`", found[1] if found else "", _DEFAULT.sub("", meaning)


def _setting_row(name: str) -> Row:
    field = GatewaySettings.model_fields[name]
    default = "required" if field.is_required() else field.default
    if default in (None, "", ()):
        default = ""
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"`{variable(name)}`", str(default), field.description or ""


def _table(head: str, rows: list[Row]) -> str:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {head} | meaning |", "|---|---|---|", *(f"| {line} |" for line in lines)])


if __name__ == "__main__":
    pages = {"options": options, "fields": fields, "metrics": metrics}
    print(pages[sys.argv[1]](), end="")
