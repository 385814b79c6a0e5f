"""Reads OpenAI's harmony format: messages, each with a channel and perhaps a recipient.

The channel `analysis` is reasoning, other text is content, and what goes to a function is a call.
A prompt ends within a message's header, or within a message.
"""

from collections.abc import Mapping

from workers.output.calls import read_arguments
from workers.output.growing_text import GrowingText, Reading, compiled
from workers.output.message import Message

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
        message: Message,
        prompt_end: str,
    ) -> None:
        self._text, self._message, self._tools = text, message, tools
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
        if is_call and not is_begun:
            self._text.mark()
            read = yield from read_arguments(self._text, self._message, name)
            if read == "none" and ((yield from self._text.match(_NOTHING)) or self._text.is_read):
                self._message.call(name, "{}")
            elif read == "none":
                self._message.say(self._text.since_mark())
        self.is_thinking = channel == "analysis" and not is_call
        emit = self._message.think if self.is_thinking else self._message.say
        if is_call:
            self._message.end_part()
        end = yield from self._text.until(_END, emit)
        self.is_thinking = False
        if end is not None:
            self._message.end_part("\n")
