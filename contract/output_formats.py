"""How a model writes its reasoning and its tool calls. Workers publish the formats with the
tokenizer: their parsers read them in outputs, gateways make grammars of them.

In literals, white space stands for any white space or none, unless a field says otherwise.
"""

from typing import Annotated, Literal

import msgspec

MAX_LITERAL_CHARS = 256
GEMMA_QUOTE = '<|"|>'  # around strings in the syntax `gemma`
_Literal = Annotated[str, msgspec.Meta(max_length=MAX_LITERAL_CHARS)]
_ParserName = Annotated[str, msgspec.Meta(max_length=64)]

Syntax = Literal[
    "object",  # {"name": NAME, "arguments": {…}}, with the keys that the format names
    "json",  # NAME middle {…}
    "tags",  # NAME middle (key_open KEY key_close VALUE value_close)*
    "python",  # [NAME(key=value, …), …], brackets and commas included
    "gemma",  # NAME{key:value,…}, with strings between <|"|>
]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Text with calls is `begin open CALL close (between open CALL close)* end`.

    Literals may contain `{id}`, the id of a call, which the caller never sees; and `key_close` may
    contain `{type}`, which says whether the value is a string (`string` or `true`).
    """

    name: _ParserName = ""  # in the table of formats; "": read from the chat template
    syntax: Syntax = "object"
    begin: _Literal = ""
    open: _Literal = ""
    close: _Literal = ""
    between: _Literal | None = ""  # None: the model writes one call only
    end: _Literal = ""
    name_key: _Literal = "name"  # of `object`
    arguments_key: _Literal = "arguments"  # of `object`
    id_key: _Literal = ""  # of `object`: a key for the call's id
    id_first: bool = False  # the id's key stands before the name, or behind the arguments
    middle: _Literal = ""  # of `json` and `tags`
    # Of `tags`. White space here stands for itself or for none: values keep their own.
    key_open: _Literal = ""
    key_close: _Literal = ""
    value_close: _Literal = ""
    has_cdata: bool = False  # of `tags`: values may stand in <![CDATA[…]]>
    # The number of letters and digits that the chat template requires of ids in prompts; 0: any.
    id_length: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0

    @property
    def is_bare(self) -> bool:
        """Whether calls have no marks. Then only the start of the answer and text behind another
        call can be a call, and only of a function that was offered."""
        return not (self.begin or self.open).strip(" \n[{\"'")


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An output is `open REASONING close`, then the answer; or the answer alone. The prompt may end
    with `open`, or with `open` and `close`."""

    name: _ParserName
    open: _Literal
    close: _Literal
    # Literals around an answer: behind reasoning, or at the start of the output.
    before_answer: _Literal = ""
    before_first_answer: _Literal = ""
    after_answer: _Literal = ""
    before_call: _Literal = ""  # between reasoning and a tool call
    # OpenAI's harmony: messages with channels and recipients, as in the other fields' examples.
    is_harmony: bool = False

    def state_after(self, prompt: str) -> Literal["open", "closed", "none"]:
        """Whether a prompt has begun the reasoning, ended it, or leaves that to the model."""
        text = prompt.rstrip()
        if text.endswith(self.open.strip()):
            return "open"
        return "closed" if text.endswith(self.close.strip()) else "none"
