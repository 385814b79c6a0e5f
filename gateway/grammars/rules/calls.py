"""Grammars of tool calls in a model's format, each with the arguments that its function takes, and
what surrounds an answer: the reasoning before it, and marks of the format.

A constraint binds the answer alone. What comes first depends on where the prompt leaves the
reasoning.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from gateway.grammars.rules.arguments import GemmaArguments, PythonArguments, TagArguments
from gateway.grammars.rules.lark import ANY_TEXT, Lark, either, json_rule, maybe, quoted
from gateway.grammars.schemas.refusals import GrammarRefused


class Reasoning(TypedDict):
    """How the model reasons in one chat."""

    format: Mapping[str, Any]  # the fields of ReasoningFormat
    state: str  # after the prompt: ReasoningFormat.state_after
    budget: int | None  # the most tokens of the reasoning, which an added token must end


class Frame:
    """The rules around an answer. If `reasoning` is None, nothing surrounds it."""

    def __init__(self, lark: Lark, reasoning: Reasoning | None) -> None:
        self._lark = lark
        self._fields = {} if reasoning is None else reasoning["format"]
        self._state = "closed" if reasoning is None else reasoning["state"]
        self._budget = None if reasoning is None else reasoning["budget"]

    @property
    def marks_answers(self) -> bool:
        """Whether answers are enclosed in marks, separate from calls."""
        return bool(self._of("before_answer") or self._of("before_first_answer"))

    @property
    def own_ids(self) -> list[int]:
        """The added tokens of the format. Texts exclude them, because they begin or end something.
        In harmony this includes those of calls."""
        if self._fields.get("is_harmony"):
            return self._lark.all_ids
        fields = (str(value) for value in self._fields.values())
        return self._lark.ids_in("\0".join(fields))

    def free_text(self, without: Collection[int] = ()) -> str:
        """A rule for any text and added tokens that do not begin like reasoning."""
        lark, first = self._lark, self._lark.text
        if opening := self._of("open").strip():
            spelled = rf"/\s*/ {quoted(opening)} {ANY_TEXT}"
            first = lark.rule("UNOPENED", f"{ANY_TEXT} & ~({spelled})")
        added = lark.added([*self.own_ids, *without])
        return f"{first} ({added} {lark.text})*" if added else first

    def around(self, answer: str = "", call: str = "") -> str:
        """Returns a rule for a whole output: reasoning, as the prompt requires, then an answer or a
        call. The format's ending of an answer may be missing."""
        lark = self._lark
        behind = either(
            answer and self._answer("before_answer", answer),
            call and f"{lark.literal(self._of('before_call'))} {call}",
        )
        if self._state == "closed":
            return behind
        if self._state == "open":
            return f"{self._reasoning()} {behind}"
        opened = f"{lark.literal(self._of('open').strip())} {self._reasoning()} {behind}"
        return either(opened, answer and self._answer("before_first_answer", answer), call)

    def _answer(self, before: str, answer: str) -> str:
        literal, after = self._lark.literal, self._of("after_answer")
        space = maybe(after[: len(after) - len(after.lstrip())])
        behind = f"({space} {literal(after.strip())})?" if after else ""
        return f"{literal(self._of(before))} {answer} {behind}"

    def _reasoning(self) -> str:
        """A rule for reasoning after its opening mark, up to the white space that may follow it."""
        lark, close = self._lark, self._of("close")
        space = maybe(close[len(close.rstrip()) :])
        text, mark, rest = lark.split(close.strip())
        if mark and not text:
            excluded = ",".join(map(str, sorted({*self.own_ids, *lark.ends})))
            times = "*" if self._budget is None else f"{{0,{self._budget}}}"
            thought = "" if self._budget == 0 else f"<[^{excluded}]>{times}"
            return f"{thought} {lark.literal(mark + rest)} {space}"
        reasoned = lark.up_to("reasoned", text + mark, self.own_ids)
        return f"{reasoned} {lark.literal(rest)} {space}"

    def _of(self, name: str) -> str:
        return str(self._fields.get(name, ""))


class ToolCalls(TypedDict):
    """The calls that an output may contain, in a model's format."""

    format: Mapping[str, Any]  # the fields of ToolFormat
    is_bare: bool  # of the format
    # Place among the tools, name, schema of the arguments, whether strict.
    functions: Sequence[tuple[int, str, Any, bool]]
    is_forced: bool  # False: the output may also be text, or begin with text
    may_repeat: bool
    # Unless calls are forced, the constraint of an answer instead of calls: a request to compile.
    answer: NotRequired[Mapping[str, Any] | None]


def tool_rules(lark: Lark, frame: Frame, calls: ToolCalls) -> str:
    """Returns a rule for the output: calls, text, or both. Raises GrammarRefused."""
    rules = _CallRules(lark, calls)
    if calls["is_forced"]:
        return frame.around(call=rules.calls())
    if calls.get("answer") is not None:
        return frame.around("@answer", rules.calls())
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
        self._lark, self._format, self._is_bare = lark, calls["format"], calls["is_bare"]
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
        except GrammarRefused as refusal:
            path = (f"{number}.function.parameters", *refusal.path)
            raise GrammarRefused(str(refusal), path) from None
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
        opening = f"{{{before}, {json.dumps(format_['arguments_key'])}: "
        start = self._lark.literal(opening)
        if self._is_bare:  # in the terminals of JSON, which an answer may be, too
            start = " ".join(map(quoted, re.findall(r'"[^"]*"|[^"\s]\s?', opening)))
        end = self._lark.literal(f", {id_}}}" if id_ and not is_first else "}")
        return f"{start} {arguments} {end}"
