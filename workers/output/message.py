"""The message that an output becomes: content, reasoning and tool calls, in deltas."""

from dataclasses import dataclass, field

from contract.events import ToolCallDelta


@dataclass(slots=True)
class ResponseDelta:
    """What more text has added to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def extend(self, later: "ResponseDelta") -> None:
        self.content += later.content
        self.reasoning += later.reasoning
        for call in later.tool_calls:
            self.add_call(call)

    def add_call(self, call: ToolCallDelta) -> None:
        if self.tool_calls and self.tool_calls[-1].index == call.index:
            last = self.tool_calls[-1]
            arguments = last.arguments + call.arguments
            self.tool_calls[-1] = ToolCallDelta(call.index, last.name, arguments)
        else:
            self.tool_calls.append(call)


class MessageBuilder:
    """Collects deltas. White space between parts of the output belongs to the content only if
    there is content before and behind it."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._new = ResponseDelta()
        self._has_content = self._has_reasoning = False
        self._is_between = False  # a part has ended, and only white space has followed
        self._gap = self._reasoning_gap = ""  # white space that may be dropped

    def take(self) -> ResponseDelta:
        """Returns what is new since the last call."""
        new, self._new = self._new, ResponseDelta()
        return new

    def end_part(self, gap: str = "") -> None:
        """Ends a call or the reasoning. `gap` is inserted before more content or reasoning."""
        self._is_between = True
        self._gap, self._reasoning_gap = gap, gap

    def end(self) -> None:
        if not self._is_between:
            self._new.content += self._gap

    def say(self, text: str) -> None:
        """Adds content. White space waits for more: a call may follow."""
        rest = text.lstrip() if self._is_between else text
        self._gap += text[: len(text) - len(rest)]
        content = rest.rstrip()
        if content:
            if self._has_content or not self._is_between:
                content = self._gap + content
            self._new.content += content
            self._has_content, self._is_between, self._gap = True, False, ""
        self._gap += rest[len(rest.rstrip()) :]

    def think(self, text: str) -> None:
        """Adds reasoning, without the white space around it."""
        rest = text.rstrip()
        if rest and not self._has_reasoning:
            self._new.reasoning += rest.lstrip()
        elif rest:
            self._new.reasoning += self._reasoning_gap + rest
        if rest:
            self._has_reasoning, self._reasoning_gap = True, ""
        self._reasoning_gap += text[len(rest) :]

    def call(self, name: str, arguments: str) -> None:
        self._new.add_call(ToolCallDelta(self.num_calls, name, arguments))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Adds arguments to the last call."""
        if text:
            self._new.add_call(ToolCallDelta(self.num_calls - 1, "", text))
