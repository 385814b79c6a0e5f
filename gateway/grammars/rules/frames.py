"""What a grammar lets stand around an answer: the reasoning before it, and marks of the format.

A constraint binds the answer alone. How the prompt leaves the reasoning decides what comes first.
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
    """The rules around an answer. Without `reasoning` there is nothing around it."""

    def __init__(self, lark: Lark, reasoning: Reasoning | None) -> None:
        self._lark = lark
        self._fields = {} if reasoning is None else reasoning["format"]
        self._state = "closed" if reasoning is None else reasoning["state"]
        self._budget = None if reasoning is None else reasoning["budget"]

    @property
    def marks_answers(self) -> bool:
        """Whether an answer stands between marks, and a call apart from it."""
        return bool(self._of("before_answer") or self._of("before_first_answer"))

    @property
    def own_ids(self) -> list[int]:
        """The format's added tokens: in texts they would begin or end something. In harmony those
        of calls do, too."""
        if self._fields.get("is_harmony"):
            return self._lark.all_ids
        fields = (str(value) for value in self._fields.values())
        return self._lark.ids_in("\0".join(fields))

    def free_text(self, without: Collection[int] = ()) -> str:
        """Any text and added tokens, which do not begin as reasoning does."""
        lark, first = self._lark, self._lark.text
        if opening := self._of("open").strip():
            spelled = rf"/\s*/ {quoted(opening)} {ANY_TEXT}"
            first = lark.rule("UNOPENED", f"{ANY_TEXT} & ~({spelled})")
        added = lark.added([*self.own_ids, *without])
        return f"{first} ({added} {lark.text})*" if added else first

    def around(self, answer: str = "", call: str = "") -> str:
        """What an output is: reasoning, as the prompt asks for it, and an answer or a call. What
        the format has behind an answer may be missing."""
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
        """Reasoning from behind its opening on, to the white space that may follow its end."""
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
