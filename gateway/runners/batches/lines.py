"""The lines of a batch's file: what each must be, and the whole file's validation."""

import hashlib
import json
import os
from collections.abc import AsyncIterator
from typing import IO, Any

import msgspec
from pydantic import BaseModel

from contract.batches import MAX_ERRORS, LineError
from contract.jobs import Endpoint
from gateway.http.bodies import JsonBodies
from gateway.http.errors import ApiError
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.prepare.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from gateway.settings import variable

MAX_CUSTOM_ID = 512
_BOM = b"\xef\xbb\xbf"
_BODIES: dict[Endpoint, type[BaseModel]] = {
    Endpoint.CHAT: ChatBody,
    Endpoint.COMPLETIONS: CompletionBody,
    Endpoint.EMBEDDINGS: EmbeddingsBody,
    Endpoint.RERANK: RerankBody,
    Endpoint.SCORE: ScoreBody,
    Endpoint.CLASSIFY: ClassifyBody,
    Endpoint.RESPONSES: ResponseBody,
}


class Line(msgspec.Struct, frozen=True):
    """One request of a batch. Its text is in a file that it shares with others: parsed, a body
    takes ten times the memory, and 64 lines may have 256 MiB.

    `number` is that of its line in the file, from 1. `is_kept`: whether a response is also stored
    beside the batch's output, which has it anyway. `start`, `num_bytes`: of its text in `texts`.
    """

    number: int
    custom_id: str
    model: str
    is_kept: bool
    texts: IO[bytes]
    start: int
    num_bytes: int

    @property
    def body(self) -> dict[str, Any]:
        self.texts.seek(self.start)
        raw = self.texts.read(self.num_bytes)
        body: dict[str, Any] = json.loads(raw.decode())["body"]  # it was checked before
        return body


class BadLine(Exception):
    """The line is no request of the batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


async def requests(
    lines: AsyncIterator[bytes | None], max_lines: int
) -> AsyncIterator[tuple[int, bytes | None]]:
    """Yields the lines that are not blank, each with its number in the file; None instead of one
    that is too long. Joined files have byte order marks where they meet. Raises BadLine if there
    are too many blank lines."""
    number = num_blank = 0
    async for raw in lines:
        number += 1
        text = b"-" if raw is None else raw.removeprefix(_BOM)
        if text.strip():
            yield number, None if raw is None else text
            continue
        num_blank += 1
        if num_blank > max_lines:
            raise BadLine("too_many_lines", f"the file has more than {max_lines} blank lines")


class Validation:
    """The checks of a file, line by line. `errors` are those of the first bad lines, `num_lines`
    counts requests, `first_number` is the line of the first."""

    def __init__(self, endpoint: Endpoint, max_lines: int, bodies: JsonBodies) -> None:
        self._endpoint = endpoint
        self._bodies = bodies
        self._max_lines = max_lines
        self._seen: set[bytes] = set()  # hashes of the custom ids
        self.model = ""
        self.num_lines = 0
        self.first_number = 0
        self.errors: list[LineError] = []

    async def run(self, lines: AsyncIterator[bytes | None]) -> None:
        """Reads lines to the end, or until nothing more could be listed. Raises PayloadError,
        Busy."""
        try:
            async for number, raw in requests(lines, self._max_lines):
                await self._note(raw, number)
                if len(self.errors) == MAX_ERRORS:
                    return
        except BadLine as exc:
            self.errors = [LineError(exc.code, exc.message)]
            return
        if not self.num_lines:
            self.errors.append(LineError("empty_file", "the file has no lines"))

    async def _note(self, raw: bytes | None, number: int) -> None:
        """Raises BadLine if the file is too long."""
        self.num_lines += 1
        self.first_number = self.first_number or number
        if self.num_lines > self._max_lines:
            message = f"the file has more than {self._max_lines} lines"
            raise BadLine("too_many_lines", message)
        try:
            await self._check(raw, number)
        except BadLine as exc:
            self.errors.append(LineError(exc.code, exc.message, number, exc.param))

    async def _check(self, raw: bytes | None, number: int) -> None:
        fields = await checked_fields(raw, self._endpoint, self._bodies)
        digest = hashlib.sha256(fields["custom_id"].encode()).digest()[:16]
        if digest in self._seen:
            message = "the custom_id is that of an earlier line"
            raise BadLine("duplicate_custom_id", message, "custom_id")
        self._seen.add(digest)
        model = fields["body"]["model"]
        self.model = self.model or model
        if model != self.model:
            message = "the model differs from that of the first line: a batch is of one model"
            raise BadLine("mismatched_model", message, "body.model")


async def parse_line(
    raw: bytes | None, number: int, endpoint: Endpoint, bodies: JsonBodies, texts: IO[bytes]
) -> Line:
    """Writes the line to the end of `texts`. Raises BadLine, Busy."""
    fields = await checked_fields(raw, endpoint, bodies)
    body, start = fields["body"], texts.seek(0, os.SEEK_END)
    num_bytes = texts.write(raw or b"")
    is_kept = body.get("store") is True
    return Line(number, fields["custom_id"], body["model"], is_kept, texts, start, num_bytes)


async def checked_fields(
    raw: bytes | None, endpoint: Endpoint, bodies: JsonBodies
) -> dict[str, Any]:
    """Checks all but the body's fields, whose errors are in the line's response; ignores other
    names. Raises BadLine, Busy."""
    if raw is None:
        message = f"the line is longer than a call's body may be: {variable('max_body_bytes')}"
        raise BadLine("line_too_long", message)
    try:
        fields = await bodies.parse(raw)
    except ApiError as exc:
        message = exc.message.replace("the body", "the line").replace("line 1, ", "")
        raise BadLine("invalid_json_line", message) from None
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters"
        raise BadLine("invalid_custom_id", message, "custom_id")
    if fields.get("method") != "POST":
        raise BadLine("invalid_method", "method must be 'POST'", "method")
    if fields.get("url") != endpoint:
        raise BadLine("mismatched_url", "url must be the endpoint of the batch", "url")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be an object", "body")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise BadLine("missing_required_parameter", "body.model must name a model", "body.model")
    if body.get("stream"):
        raise BadLine("unsupported_parameter", "a batch has no streams", "body.stream")
    if endpoint is Endpoint.RESPONSES and body.get("background"):
        message = "nobody waits for a batch's responses: leave background out"
        raise BadLine("unsupported_parameter", message, "body.background")
    return fields


def call_body(line: Line, endpoint: Endpoint) -> CallBody | ResponseBody:
    """Raises pydantic's ValidationError."""
    body = line.body
    if endpoint is Endpoint.RESPONSES and body.get("store") is None:
        body = body | {"store": False}
    return _BODIES[endpoint].model_validate(body)  # type: ignore[return-value]
