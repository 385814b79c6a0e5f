"""The headers of the functions name the arguments that the typed calls send."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract import library
from contract.api_keys import KeyTerms
from contract.batches import Batches, NewBatch
from contract.errors import WireError
from contract.files import Files, StoredFile
from contract.function_types import (
    Append,
    Blame,
    JobView,
    Release,
    Submission,
    TenantLimits,
    Wanted,
)
from contract.functions import Functions
from contract.jobs import Endpoint, Job
from contract.keys import Keys
from contract.library import Partition, Word
from contract.operations import OperationKind, Operations
from contract.outbox import Outbox, Taken
from contract.pauses import PauseLine, Pauses
from tests.contract.some_calls import make_job, make_submission

LUA = Path(library.__file__).parent / "lua"
CLASSES = (Functions, Batches, Files, Operations, Outbox, Pauses)


# A value of each type that a call needs.
SOME: dict[Any, Any] = {
    str: "x",
    int: 1,
    float: 1.0,
    bool: True,
    Job: make_job(),
    Submission: make_submission(),
    TenantLimits: TenantLimits(),
    Wanted: Wanted(),
    Taken: Taken("j", 1),
    PauseLine: PauseLine(),
    OperationKind: OperationKind.CANCEL,
    StoredFile: StoredFile(id="f", tenant="t", num_bytes=1, purpose="batch", filename="f"),
    NewBatch: NewBatch(
        endpoint=Endpoint.COMPLETIONS,
        input_file_id="f",
        completion_window="24h",
        terms=KeyTerms(tenant="t"),
        output_lifetime_s=1.0,
    ),
    Append: Append("j", 1, 1),
    Release: Release("j", 1, "drain"),
    Blame: Blame("j", 1, "{}"),
}


class _Sent(Exception):
    """Ends a call where it would ask Redis."""


def header(name: str, word: str) -> str:
    """What the header of a function says of KEYS, ARGV or reply, without the lines' beginnings."""
    lines = re.findall(r"^--(.*\n)", (LUA / f"{name}.lua").read_text(), re.M)
    text = "".join(lines).partition(f" {word} ")[2]
    return re.split(r"^ [a-zA-Z]+ ", text, maxsplit=1, flags=re.M)[0]


def value_of(hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return args[0]
    if origin is tuple:
        return tuple(map(value_of, args))
    if origin is Sequence:
        return [value_of(args[0])]
    if origin is Mapping:
        return {}
    return SOME[hint] if hint in SOME else value_of(args[0])  # of a union


def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Word, ...]]:
    """The arguments of each function, as its typed call sends them where only those that a caller
    must give are given."""
    found: dict[str, tuple[Word, ...]] = {}

    async def call(self: Partition, name: str, *args: Word, **options: object) -> Any:
        found[name] = args
        raise _Sent

    monkeypatch.setattr(Partition, "_call", call)
    for kind in CLASSES:
        one = kind(None, Keys())  # type: ignore[arg-type]
        for name, act in inspect.getmembers(one, inspect.iscoroutinefunction):
            if not name.startswith("_"):
                send(act)
    return found


def send(act: Callable[..., Any]) -> None:
    hints = typing.get_type_hints(act)
    given = {
        name: value_of(hints[name])
        for name, parameter in inspect.signature(act).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    }
    try:
        act(**given).send(None)
    except (_Sent, AttributeError, WireError):  # the latter two: it asks Redis without a function
        return


def test_each_function_gets_the_arguments_of_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many as are numbered; with `…` or `for each` any number from there on."""
    calls = sent(monkeypatch)
    assert calls.keys() == {path.stem for path in LUA.glob("[a-z]*.lua")}
    for name, args in calls.items():
        text = header(name, "ARGV")
        if text.startswith("as submit"):
            text = header("submit", "ARGV")
        if not re.match(r"\s*1 ", text):
            continue  # one list, of any length
        number = 1
        while re.search(rf"(^|\s){number + 1}(…| )", text):
            number += 1
        is_open = re.search(rf"(^|\s){number} ?…|for each", text)
        least = number - 1 if re.search(rf"(^|\s){number} ?…", text) else number
        assert len(args) >= least if is_open else len(args) == number, f"{name}: {args}"


def test_submit_names_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = msgspec.msgpack.decode(typing.cast(bytes, sent(monkeypatch)["submit"][5]))
    listed = header("submit", "ARGV").partition("(a msgpack map):")[2].partition(" 7 metadata")[0]
    while "(" in listed:
        listed = re.sub(r"\([^()]*\)", "", listed)
    assert terms.keys() == set(re.findall(r"\w+", listed))


def test_a_view_has_the_fields_that_the_functions_give() -> None:
    [listed] = re.findall(r"VIEW_FIELDS = \{(.*?)\}", (LUA / "_shared.lua").read_text(), re.S)
    fields = {field.encode_name for field in msgspec.structs.fields(JobView)}
    assert set(re.findall(r"\w+", listed)) == fields - {"position"}
