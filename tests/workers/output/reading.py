"""Reads a whole output in pieces."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from contract.output_formats import ReasoningFormat, ToolFormat
from tests.workers.output.writing import Call
from workers.output.calls import Alternatives
from workers.output.formats import REASONING_FORMATS, TOOL_FORMATS
from workers.output.message import ResponseDelta
from workers.output.parser import OutputParser

TOOLS: Mapping[str, tuple[str, ...]] = {"find": ("text", "place"), "now": (), "a-b_2": ("text",)}


def tool_format(name: str) -> ToolFormat:
    return next(each for each in TOOL_FORMATS if each.name == name)


def reasoning_format(name: str) -> ReasoningFormat:
    return next(each for each in REASONING_FORMATS if each.name == name)


def read(
    parts: str | Sequence[str],
    calls: ToolFormat | None = None,
    reasoning: ReasoningFormat | None = None,
    prompt_end: str = "",
    tools: Mapping[str, tuple[str, ...]] = TOOLS,
    alternatives: Alternatives | None = None,
) -> ResponseDelta:
    parser = OutputParser(calls, reasoning, prompt_end, tools, alternatives)
    message = ResponseDelta()
    for part in [parts] if isinstance(parts, str) else parts:
        message.extend(parser.push(part))
    message.extend(parser.finish())
    assert parser.num_calls == len(message.tool_calls)
    return message


def calls_of(message: ResponseDelta) -> list[Call]:
    """Raises ValueError if arguments are cut."""
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def split(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(ends)]


def splits_of(text: str) -> list[list[str]]:
    """The text in characters, in threes, and cut in two at every place."""
    threes = [text[i : i + 3] for i in range(0, len(text), 3)]
    return [list(text), threes, *([text[:i], text[i:]] for i in range(1, len(text)))]


def same_for_all_splits(text: str, *args: Any, **kwargs: Any) -> ResponseDelta:
    """The message, which is the same wherever the text is cut."""
    whole = read(text, *args, **kwargs)
    for parts in splits_of(text):
        assert read(parts, *args, **kwargs) == whole, parts
    return whole
