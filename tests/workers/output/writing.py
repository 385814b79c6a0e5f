"""Writes messages as models do, from the same descriptions by which outputs are read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from contract.output_formats import ToolFormat

Call = tuple[str, Mapping[str, Any]]
_QUOTE = '<|"|>'


def write_calls(format_: ToolFormat, calls: Sequence[Call]) -> str:
    """The calls as the format says, with the white space that it names."""
    if format_.syntax == "python":
        return f"{format_.begin}[{', '.join(_python(*call) for call in calls)}]{format_.end}"
    written = [
        format_.open.replace("{id}", f"callnum{number:02}")
        + _BODIES[format_.syntax](format_, number, *call)
        + format_.close
        for number, call in enumerate(calls)
    ]
    return format_.begin + (format_.between or "").join(written) + format_.end


def _object(format_: ToolFormat, number: int, name: str, arguments: Mapping[str, Any]) -> str:
    call = {format_.name_key: name, format_.arguments_key: arguments}
    ids = {format_.id_key: f"callnum{number:02}"} if format_.id_key else {}
    return _json({**ids, **call} if format_.id_first else {**call, **ids})


def _named(format_: ToolFormat, number: int, name: str, arguments: Mapping[str, Any]) -> str:
    return name + format_.middle.replace("{id}", f"callnum{number:02}") + _json(arguments)


def _tags(format_: ToolFormat, number: int, name: str, arguments: Mapping[str, Any]) -> str:
    text = name + format_.middle.replace("{id}", str(number))
    for key, value in arguments.items():
        kinds = ("true", "false") if "string=" in format_.key_close else ("string", "object")
        type_ = kinds[0] if isinstance(value, str) else kinds[1]
        given = value if isinstance(value, str) else _json(value)
        text += format_.key_open + key + format_.key_close.replace("{type}", type_)
        text += given + format_.value_close
    return text


def _gemma(format_: ToolFormat, number: int, name: str, arguments: Mapping[str, Any]) -> str:
    return name + _gemma_value(arguments)


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f"{_QUOTE}{value}{_QUOTE}"
        case Mapping():
            pairs = (f"{key}:{_gemma_value(each)}" for key, each in value.items())
            return "{" + ",".join(pairs) + "}"
        case list():
            return "[" + ",".join(map(_gemma_value, value)) + "]"
    return _json(value)


def _python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_BODIES = {"object": _object, "json": _named, "tags": _tags, "gemma": _gemma}
