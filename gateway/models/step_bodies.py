"""A pipeline step's body, made of templates over the caller's body and earlier answers.

`python -m gateway.models.step_bodies` renders it, in a process of its own. Errors name the step and
the place, not the values.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.flows import Step
from gateway.child import Refused, serve

_MAX_BODY_CHARS = 4 * 1024 * 1024


def render(step: Step, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the step's body. `values`: the caller's body under the name INPUT, and the answers of
    earlier steps under their names. Raises Refused."""
    body = _mapped(
        step.body, f"step {step.name}: body", lambda text: _plain(_compiled(text)(values))
    )
    assert isinstance(body, dict)
    return body


def check_templates(step: Step, names: Iterable[str]) -> None:
    """Checks that the templates of its body can be compiled, and use no other values than those of
    `names`. Raises Refused."""
    known = frozenset(names)

    def check(text: str) -> None:
        used = meta.find_undeclared_variables(_ENVIRONMENT.parse(text))
        if unknown := sorted(used - known - _ENVIRONMENT.globals.keys()):
            raise jinja2.UndefinedError(
                f"{unknown[0]!r} is not known there; known are {', '.join(sorted(known))}"
            )
        _compiled(text)

    _mapped(step.body, "body", check)


def _mapped(value: object, place: str, change: Callable[[str], object]) -> object:
    """Returns `value` with each string changed, except keys. A fault names its place."""
    if isinstance(value, dict):
        return {key: _mapped(item, f"{place}.{key}", change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, f"{place}[{i}]", change) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    try:
        return change(value)
    except MemoryError:
        raise  # ends the process
    except jinja2.TemplateError as exc:
        raise Refused(f"{place}: {exc.message}") from exc
    except Exception as exc:  # for example of a filter with a wrong argument; it may quote a value
        raise Refused(f"{place}: the template failed: {type(exc).__name__}") from exc


def _plain(value: object) -> object:
    """Converts a value to what JSON allows. Raises jinja2's errors."""
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises UndefinedError, with what is missing
    if isinstance(value, list | tuple | Iterator):  # iterators are of filters such as `map`
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return str(value)  # of Markup, which the filter `e` gives
    if isinstance(value, float) and not math.isfinite(value):
        raise jinja2.TemplateRuntimeError(f"its value, {value}, is no JSON")
    if not isinstance(value, int | float | None):
        raise jinja2.TemplateRuntimeError(f"its value, of type {type(value).__name__}, is no JSON")
    return value


@lru_cache(maxsize=256)
def _compiled(text: str) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function that computes the value of a template. Raises jinja2's errors."""
    stripped = text.strip()
    match _ENVIRONMENT.parse(stripped).body:
        case [nodes.Output(nodes=[_])] if stripped.startswith("{{") and stripped.endswith("}}"):
            # A sign beside the braces, as in `{{- x -}}`, is of the braces; `{{ -1 }}` is a number.
            expression = re.sub(r"^[{]{2}[-+]?|[-+]?[}]{2}$", "", stripped).strip()
            return _ENVIRONMENT.compile_expression(expression, undefined_to_none=False)
        case _:
            return _ENVIRONMENT.from_string(text).render


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
# jinja2's own escapes what HTML must not hold.
_ENVIRONMENT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)


def _answered(request: Any) -> str:
    step = msgspec.convert(request["step"], Step)
    body = json.dumps(render(step, request["values"]), ensure_ascii=False)
    if len(body) > _MAX_BODY_CHARS:
        raise Refused(f"step {step.name}: body: it has over {_MAX_BODY_CHARS} characters")
    return body


if __name__ == "__main__":
    serve(lambda _: _answered)
