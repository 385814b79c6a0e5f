"""Grammars of tool calls in a model's format, each with the arguments that its function takes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from gateway.grammars.rules.arguments import ArgumentsRefused
from gateway.grammars.rules.frames import Frame
from gateway.grammars.rules.lark import Lark, either, json_rule, maybe, quoted
from gateway.grammars.rules.literal_arguments import GemmaArguments, PythonArguments
from gateway.grammars.rules.tag_arguments import TagArguments


class ToolCalls(TypedDict):
    """The calls that an output may contain, in a model's format."""

    format: Mapping[str, Any]  # the fields of ToolFormat
    is_bare: bool  # of the format
    # Place among the tools, name, schema of the arguments, whether strict.
    functions: Sequence[tuple[int, str, Any, bool]]
    is_forced: bool  # False: the output may also be text, or begin with text
    may_repeat: bool


def tool_rules(lark: Lark, frame: Frame, calls: ToolCalls) -> str:
    """Returns a rule for the output: calls, text, or both. Raises ArgumentsRefused."""
    rules = _CallRules(lark, calls)
    if calls["is_forced"]:
        return frame.around(call=rules.calls())
    if frame.marks_answers:
        return frame.around(frame.free_text(rules.beginning_ids), rules.calls())
    if calls["is_bare"]:
        return frame.around(call=either(rules.no_call(), rules.calls()))
    return frame.around(call=rules.text_and_calls(frame.own_ids))


def free_rules(lark: Lark, frame: Frame, format_: Mapping[str, Any] | None) -> str:
    """Returns a rule for an output without a constraint. `format_`: that of its calls, if any."""
    text = frame.free_text()
    if format_ is None or not frame.marks_answers:  # else the text may contain calls
        return frame.around(text)
    head = (format_["begin"] + format_["open"]).strip()
    return frame.around(text, f"{lark.literal(head)} {text}")


class _CallRules:
    """The rules of consecutive calls: `head ONE …`."""

    def __init__(self, lark: Lark, calls: ToolCalls) -> None:
        self._lark, self._format = lark, calls["format"]
        self._may_repeat = calls["may_repeat"] and self._format["between"] is not None
        names = [self._call(*function) for function in calls["functions"]]
        self._one = lark.rule("call", " | ".join(names))
        head = self._format["begin"] + self._format["open"]
        self._space, self._head = head[: len(head) - len(head.lstrip())], head.lstrip()
        self._beginning = lark.beginning(self._head)

    @property
    def beginning_ids(self) -> list[int]:
        """The added token with which the first call begins, if there is one."""
        return self._lark.ids_in(self._beginning)

    def calls(self) -> str:
        head = self._lark.literal(self._head)
        return self._lark.rule("calls", f"{maybe(self._space)} {head} {self._behind_head()}")

    def text_and_calls(self, without: Sequence[int]) -> str:
        """A rule for text, or for calls with or without text before them."""
        lark, excluded = self._lark, [*without, *self.beginning_ids]
        begun = lark.up_to("begun", self._beginning, without)
        rest = lark.literal(self._head.removeprefix(self._beginning))
        text = f"{lark.anything(excluded)} {lark.text}"
        return lark.rule("said", f"{text} | {begun} {rest} {self._behind_head()}")

    def no_call(self) -> str:
        """A rule for text that does not begin like a call, for calls without marks."""
        first = {"python": "[", "object": "{"}.get(self._format["syntax"], "")
        characters = "".join(f"\\{each}" for each in {*self._head[:1], *first})
        pattern = rf"/(?s:\s*([^\s{characters}].*)?)/"
        return self._lark.rule("NO_CALL", pattern)

    def _behind_head(self) -> str:
        format_, literal = self._format, self._lark.literal
        if format_["syntax"] == "python":
            more = f'(", " {self._one})*' if self._may_repeat else ""
            return f'"[" {self._one} {more} "]" {literal(format_["end"])}'
        one = f"{self._one} {literal(format_['close'])}"
        between = format_["between"] or ""
        again = literal(between + format_["open"])
        more = f"({again} {one})*" if self._may_repeat else ""
        # Some models also write the white space behind the last call.
        space = "" if between.strip() else maybe(between)
        return f"{one} {more} {literal(format_['end'])} {space}"

    def _call(self, number: int, name: str, schema: Any, is_strict: bool) -> str:
        rule = f"call_{number}"
        try:
            arguments = self._arguments(rule, schema, is_strict)
        except ArgumentsRefused as refusal:
            path = (f"{number}.function.parameters", *refusal.path)
            raise ArgumentsRefused(str(refusal), path) from None
        match self._format["syntax"]:
            case "object":
                body = self._object(name, arguments)
            case "python":
                body = f'{quoted(name + "(")} {arguments} ")"'
            case "gemma":
                body = f'{quoted(name + "{")} {arguments} "}}"'
            case _:
                body = f"{quoted(name)} {self._lark.literal(self._format['middle'])} {arguments}"
        return self._lark.rule(rule, body)

    def _arguments(self, rule: str, schema: Any, is_strict: bool) -> str:
        match self._format["syntax"]:
            case "tags":
                return TagArguments(self._lark, rule, schema, is_strict, self._format).whole()
            case "python":
                return PythonArguments(self._lark, rule, schema, is_strict).whole()
            case "gemma":
                return GemmaArguments(self._lark, rule, schema, is_strict).whole()
        return json_rule(schema, is_strict)

    def _object(self, name: str, arguments: str) -> str:
        """A rule for an object with the name and the arguments, spaced as by `json.dumps`."""
        format_ = self._format
        id_ = f'{json.dumps(format_["id_key"])}: "{{id}}"' if format_["id_key"] else ""
        is_first = bool(format_["id_first"])
        named = f"{json.dumps(format_['name_key'])}: {json.dumps(name)}"
        before = f"{id_}, {named}" if id_ and is_first else named
        start = self._lark.literal(f"{{{before}, {json.dumps(format_['arguments_key'])}: ")
        end = self._lark.literal(f", {id_}}}" if id_ and not is_first else "}")
        return f"{start} {arguments} {end}"
