"""What surrounds an answer in a grammar: the reasoning before it, and marks of the format.

A constraint binds the answer alone. What comes first depends on where the prompt leaves the
reasoning.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from gateway.grammars.rules.lark import ANY_TEXT, Lark, either, maybe, quoted


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
