"""Splits the text of an output into content, reasoning and tool calls, as it is generated.

The result depends only on the text and on where it is cut, so a resumed job rebuilds the same state
from its log. Text that is neither reasoning nor a call is content, including marks.

OpenAI's harmony format has messages, each with a channel and perhaps a recipient: `analysis` is
reasoning, what goes to a function is a call, other text is content. A prompt ends within a
message's header, or within a message.
"""

from collections.abc import Mapping

from contract.output_formats import ReasoningFormat, ToolFormat
from workers.output.calls import Alternatives, CallsParser, read_arguments
from workers.output.growing_text import GrowingText, Reading, compiled, loose, pieces_of
from workers.output.message import MessageBuilder, ResponseDelta
from workers.output.stop_strings import StopStrings

MARKS = (
    "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"
)  # fmt: skip
_TO = r"to=(?P<to>[^\s<]+)"
_CHANNEL = r"<\|channel\|>\s*(?P<channel>\w+)"
_TYPE = r"(?:\s+(?!to=)[\w.\-]+)?"  # of the body, such as json
_PARTS = rf"(?:\s*(?:(?:{_TO}|{_CHANNEL}){_TYPE}|<\|constrain\|>\s*[\w.\-]*))*"
_ROLE = r"<\|start\|>\s*\w[\w.\-]*"
# A header, or what of it the prompt has left to the output.
_HEADER = compiled(rf"\s*(?:{_ROLE})?{_PARTS}\s*<\|message\|>")
_BEGUN = compiled(rf"{_ROLE}(?P<parts>{_PARTS})\s*(?P<message><\|message\|>)?(?P<rest>.*)\Z")
_END = compiled(r"<\|(?:end|return|call)\|>|(?=<\|(?:start|channel)\|>)")
_NOTHING = compiled(r"\s*(?=<\|(?:end|return|call|start|channel)\|>)")
_MARK = compiled(r"<\|\w+\|>")
_FUNCTIONS = "functions."


class Harmony:
    """Reads an output. `is_thinking`: whether the message being read is reasoning."""

    def __init__(
        self,
        tools: Mapping[str, tuple[str, ...]],
        text: GrowingText,
        message: MessageBuilder,
        prompt_end: str,
        stops: StopStrings,
    ) -> None:
        self._text, self._message, self._tools = text, message, tools
        self._stops = stops
        self.is_thinking = False
        self._prompt = _BEGUN.match(prompt_end[max(prompt_end.rfind("<|start|>"), 0) :])

    def read(self) -> Reading[None]:
        begun, channel, recipient = self._prompt, "", ""
        if begun is not None:
            channel, recipient = begun["channel"] or "", begun["to"] or ""
        if begun is not None and begun["message"]:
            yield from self._read_body(channel, recipient, is_begun=bool(begun["rest"]))
        while not self._text.is_read:
            header = yield from self._text.match(_HEADER)
            if header is not None:
                channel = header["channel"] or channel
                recipient = header["to"] or recipient
            elif self._text.ends_within(_HEADER):
                return
            elif (mark := (yield from self._text.match(_MARK))) is not None:
                self._message.say(mark.group())
            yield from self._read_body(channel, recipient)
            channel = recipient = ""

    def _read_body(self, channel: str, recipient: str, is_begun: bool = False) -> Reading[None]:
        """Reads up to the mark of the body's end, and the mark."""
        name = recipient.removeprefix(_FUNCTIONS)
        is_call = name in self._tools or (self._tools and recipient.startswith(_FUNCTIONS))
        self.is_thinking = channel == "analysis" and not is_call
        if not self.is_thinking:
            begin_answer(self._text, self._stops)
        if is_call and not is_begun:
            self._text.mark()
            read = yield from read_arguments(self._text, self._message, name)
            if read == "none" and ((yield from self._text.match(_NOTHING)) or self._text.is_read):
                self._message.call(name, "{}")
            elif read == "none":
                self._message.say(self._text.since_mark())
        emit = self._message.think if self.is_thinking else self._message.say
        if is_call:
            self._message.end_part()
        end = yield from self._text.until(_END, emit)
        self.is_thinking = self._stops.is_on = False
        self._text.unread += self._stops.flush()
        if end is not None:
            self._message.end_part("\n")


def begin_answer(text: GrowingText, stops: StopStrings) -> None:
    """Searches what follows for stop strings."""
    stops.is_on = True
    text.unread = stops.push(text.unread) + (stops.flush() if text.has_ended else "")


_NOT_SPACE = compiled(r"\s*(?=\S)")


class OutputParser:
    """Reads one choice's output. Without `tools`, calls are content.

    `prompt_end` may have begun the reasoning. `alternatives`: as of a Job. `stops`: searches the
    text before it is pushed, once the parser knows that it is the answer.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        prompt_end: str,
        tools: Mapping[str, tuple[str, ...]],
        alternatives: Alternatives | None = None,
        stops: StopStrings | None = None,
    ) -> None:
        self._text, self._message = GrowingText(), MessageBuilder()
        self._harmony: Harmony | None = None
        self._is_thinking, self._is_answer = False, True
        self._stops = StopStrings() if stops is None else stops
        self.may_reason = reasoning is not None
        if reasoning is not None and reasoning.is_harmony:
            self._harmony = Harmony(tools, self._text, self._message, prompt_end, self._stops)
            self._reading = self._harmony.read()
        else:
            calls = None
            if tool_format is not None and tools:
                calls = CallsParser(tool_format, tools, self._text, self._message, alternatives)
            if reasoning is not None:
                state = reasoning.state_after(prompt_end)
                self.may_reason, self._is_answer = state != "closed", state != "open"
            self._reading = self._read(reasoning, prompt_end, calls)
        self._stops.is_on = not self.may_reason

    @property
    def num_calls(self) -> int:
        return self._message.num_calls

    @property
    def in_reasoning(self) -> bool:
        return self._is_thinking if self._harmony is None else self._harmony.is_thinking

    @property
    def in_answer(self) -> bool:
        """Whether the next token is of the answer, as far as the text tells."""
        return self._is_answer if self._harmony is None else not self._harmony.is_thinking

    def push(self, text: str) -> ResponseDelta:
        self._text.feed(text)
        next(self._reading, None)
        return self._message.take()

    def finish(self) -> ResponseDelta:
        """Returns the rest at the end of the output."""
        self._text.has_ended = True
        next(self._reading, None)
        self._message.end()
        return self._message.take()

    def _read(
        self, reasoning: ReasoningFormat | None, prompt_end: str, calls: CallsParser | None
    ) -> Reading[None]:
        tail: tuple[str, ...] = ()
        if reasoning is not None:
            yield from self._read_reasoning(reasoning, prompt_end, calls)
            tail = pieces_of(reasoning.after_answer)
        self._is_answer = True
        begin_answer(self._text, self._stops)
        if calls is not None and calls.is_bare:
            self._text.mark()
            if (yield from self._text.match(compiled(rf"\s*{calls.start}"))) is None:
                self._text.since_mark()
            else:
                yield from calls.read()
        yield from self._read_answer(tail, calls)

    def _read_reasoning(
        self, format_: ReasoningFormat, prompt_end: str, calls: CallsParser | None
    ) -> Reading[None]:
        state = format_.state_after(prompt_end)
        opening = None
        if state != "closed":
            opening = yield from self._text.match(compiled(rf"\s*{loose(format_.open)}"))
        if state == "closed":
            pass  # marks are text from here on
        elif state == "open" or opening is not None:
            self._is_thinking, self._is_answer = True, False
            yield from self._read_thoughts(loose(format_.close), calls)
            self._is_thinking = False
        elif (yield from self._text.match(compiled(rf"\s*{loose(format_.close)}"))) is not None:
            state = "closed"  # by the output, which has no reasoning
        is_answer = state != "none" or opening is not None
        for literal in (format_.before_answer, format_.before_first_answer, format_.before_call):
            if literal and (yield from self._text.match(compiled(rf"\s*{loose(literal)}"))):
                is_answer = True
                break
        if is_answer:
            self._message.end_part()
            yield from self._text.match(_NOT_SPACE)

    def _read_thoughts(self, close: str, calls: CallsParser | None) -> Reading[None]:
        """Reads up to the mark of the reasoning's end, and the mark; or up to calls, if no answer
        follows them: models forget the mark. Calls in a reasoning with an answer are part of it."""
        start = "(?!)" if calls is None or calls.is_bare else calls.start
        end = compiled(close)
        either = compiled(rf"{close}|(?P<call>{start})")
        found = yield from self._text.until(either, self._message.think)
        if calls is None or found is None or found["call"] is None:
            return
        self._text.mark(len(found.group()))
        closed = yield from self._text.until(end, lambda _: None)
        thought = self._text.marked.removesuffix(closed.group() if closed else "")
        if closed is not None and thought.rstrip().endswith(calls.last_mark):
            is_last = (yield from self._text.match(_NOT_SPACE)) is None and self._text.has_ended
            closed = None if is_last else closed
        if closed is not None:
            self._text.since_mark()
            self._message.think(thought)
            return
        self._text.rewind()
        self._text.unread = thought

    def _read_answer(self, tail: tuple[str, ...], calls: CallsParser | None) -> Reading[None]:
        """Reads content, and calls within it. `tail`: the parts of what may follow the content."""
        start = "(?!)" if calls is None or calls.is_bare else calls.start
        begins_call, ending = compiled(f"(?={start})"), "(?!)"
        if tail:
            ending = rf"(?P<tail>{tail[0]})"
        either = compiled(f"{ending}|(?P<call>{start})")
        while (found := (yield from self._text.until(either, self._message.say))) is not None:
            self._text.mark(len(found.group()))
            if calls is not None and found["call"] is not None:
                yield from calls.read()
                continue
            for piece in tail[1:]:
                yield from self._text.match(compiled(rf"\s*{piece}"))
            if (yield from self._text.match(begins_call)) is not None:
                self._text.since_mark()
            elif (yield from self._text.match(_NOT_SPACE)) is not None:
                self._message.say(self._text.since_mark())
            else:
                self._message.end_part()
                return
