"""The lines of a batch's file: what each must be, and the whole file's validation."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from pydantic import BaseModel

from contract.batches import MAX_ERRORS, LineError
from contract.jobs import Endpoint
from gateway.http.bodies import parse_object
from gateway.http.errors import ApiError
from gateway.openai.job_bodies import CallBody
from gateway.openai.responses.bodies import ResponseBody
from gateway.openai.schemas import ChatBody, CompletionBody
from gateway.openai.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody

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
    """One request of a batch; `number` counts from 1."""

    number: int
    custom_id: str
    body: dict[str, Any]


class BadLine(Exception):
    """The line is no request of the batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class Validation:
    """The checks of a file, line by line. `errors` are those of the first bad lines."""

    def __init__(self, endpoint: Endpoint, max_lines: int) -> None:
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._seen: set[bytes] = set()  # hashes of the custom ids
        self.model = ""
        self.num_lines = 0
        self.errors: list[LineError] = []

    async def run(self, lines: AsyncIterator[bytes | None]) -> None:
        """Reads lines to the end, or until nothing more could be listed. Raises PayloadError."""
        async for raw in lines:
            self.num_lines += 1
            try:
                self._check(raw)
            except BadLine as exc:
                error = LineError(exc.code, exc.message, self.num_lines, exc.param)
                self.errors.append(error)
            if self.num_lines > self._max_lines:
                message = f"the file has more than {self._max_lines} lines"
                self.errors = [LineError("too_many_lines", message, self.num_lines)]
                return
            if len(self.errors) == MAX_ERRORS:
                return
        if not self.num_lines:
            self.errors.append(LineError("empty_file", "the file has no lines"))

    def _check(self, raw: bytes | None) -> None:
        line = parse_line(raw, self.num_lines, self._endpoint)
        digest = hashlib.sha256(line.custom_id.encode()).digest()[:16]
        if digest in self._seen:
            message = "the custom_id is that of an earlier line"
            raise BadLine("duplicate_custom_id", message, "custom_id")
        self._seen.add(digest)
        model = line.body["model"]
        self.model = self.model or model
        if model != self.model:
            message = "the model differs from that of the first line"
            raise BadLine("mismatched_model", message, "body.model")


def parse_line(raw: bytes | None, number: int, endpoint: Endpoint) -> Line:
    """Checks all but the body's fields, whose errors are the line's response. Raises BadLine."""
    if raw is None:
        raise BadLine("line_too_long", "the line is longer than the body of a call may be")
    if raw.startswith(_BOM):
        raise BadLine("invalid_json_line", "the line begins with a byte order mark: remove it")
    if not raw.strip():
        raise BadLine("invalid_json_line", "the line is empty")
    try:
        fields = parse_object(raw)
    except ApiError as exc:
        message = exc.message.replace("the body", "the line").replace("line 1, ", "")
        raise BadLine("invalid_json_line", message) from None
    custom_id = fields.pop("custom_id", None)
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters"
        raise BadLine("invalid_custom_id", message, "custom_id")
    if fields.pop("method", None) != "POST":
        raise BadLine("invalid_method", "method must be 'POST'", "method")
    if fields.pop("url", None) != endpoint:
        raise BadLine("mismatched_url", "url must be the endpoint of the batch", "url")
    body = fields.pop("body", None)
    if fields:
        name = min(fields)[:64]
        raise BadLine("unknown_parameter", f"unknown parameter: {name}", name)
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be an object", "body")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise BadLine("missing_required_parameter", "body.model must name a model", "body.model")
    if body.get("stream"):
        raise BadLine("unsupported_parameter", "a batch has no streams", "body.stream")
    if endpoint is Endpoint.RESPONSES and body.get("background"):
        message = "nobody waits for a batch's responses: leave background out"
        raise BadLine("unsupported_parameter", message, "body.background")
    return Line(number, custom_id, body)


def is_kept(line: Line) -> bool:
    """Whether a response is also stored beside the batch's output, which has it anyway."""
    return line.body.get("store") is True


def call_body(line: Line, endpoint: Endpoint) -> CallBody | ResponseBody:
    """Raises pydantic's ValidationError."""
    body = line.body
    if endpoint is Endpoint.RESPONSES and body.get("store") is None:
        body = body | {"store": False}
    return _BODIES[endpoint].model_validate(body)  # type: ignore[return-value]
