"""Reads streams of answers as callers do, with the parser of `batchway_client`."""

from collections.abc import AsyncIterator

import httpx

from batchway_client.events import Event, Parser


async def events_of(answer: httpx.Response) -> AsyncIterator[Event]:
    """The events of an answer as they come; one that is cut off is left out."""
    parser = Parser()
    async for part in answer.aiter_bytes():
        for event in parser.feed(part):
            yield event


def whole_stream(content: bytes | str) -> list[Event]:
    """The events of a complete stream, whose last line is [DONE]."""
    text = content if isinstance(content, str) else content.decode()
    assert text.endswith("data: [DONE]\n\n"), text[-500:]
    return list(Parser().feed(text.encode()))


async def whole_answer(answer: httpx.Response) -> list[Event]:
    """The events of a stream to its end."""
    assert answer.status_code == 200, await answer.aread()
    return whole_stream(await answer.aread())
