"""API Gateway in front of the emulator, with what template.yaml says of paths and media types, and
the lengths that it and Lambda take."""

import base64
import json
import re
from fnmatch import fnmatchcase

import httpx2

from tests.aws.emulator import Emulator
from tests.aws.lambda_events import rest_event
from tests.aws.template import of_type

MAX_EVENT_BYTES = 6_291_556  # Lambda's, of an event and of a buffered answer
MAX_BODY_BYTES = 10 * 2**20  # API Gateway's


class Door(httpx2.AsyncBaseTransport):
    """A transport of the API's address. `stream_url`: of StreamFunction's program."""

    def __init__(self, emulator: Emulator, stream_url: str) -> None:
        self._emulator = emulator
        self._stream = httpx2.AsyncClient(base_url=stream_url, timeout=60)
        [api] = of_type("AWS::ApiGateway::RestApi").values()
        self._binary = api["Body"]["x-amazon-apigateway-binary-media-types"]
        refusals = api["Body"]["x-amazon-apigateway-gateway-responses"]
        template = refusals["REQUEST_TOO_LARGE"]["responseTemplates"]["application/json"]
        self._too_large = httpx2.Response(413, json=json.loads(template))
        self._streamed = [
            (method.upper(), re.compile(re.sub(r"\{\w+\}", "[^/]+", path)))
            for path, methods in api["Body"]["paths"].items()
            for method, found in methods.items()
            if "responseTransferMode" in found["x-amazon-apigateway-integration"]
        ]

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body, path = await request.aread(), request.url.path
        if len(body) > MAX_BODY_BYTES:
            return self._too_large
        if any(
            method == request.method and pattern.fullmatch(path)
            for method, pattern in self._streamed
        ):
            return await self._stream.request(
                request.method, request.url.raw_path.decode(), content=body, headers=request.headers
            )
        return await self._buffered(request, body)

    async def _buffered(self, request: httpx2.Request, body: bytes) -> httpx2.Response:
        event = rest_event(request.method, request.url.path, headers=dict(request.headers))
        parameters = dict(request.url.params)
        event["queryStringParameters"] = parameters or None
        event["multiValueQueryStringParameters"] = {n: [v] for n, v in parameters.items()} or None
        if body and self._is_binary(request.headers.get("content-type", "")):
            event |= {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}
        elif body:
            event["body"] = body.decode(errors="replace")
        if len(json.dumps(event)) > MAX_EVENT_BYTES:
            return self._too_large
        answer = await self._emulator.invoke(event)
        if len(answer.content) > MAX_EVENT_BYTES or "statusCode" not in answer.json():
            return httpx2.Response(502, json={"message": "Internal server error"})
        found = answer.json()
        content = found["body"].encode()
        if found["isBase64Encoded"] and self._is_binary(request.headers.get("accept", "")):
            content = base64.b64decode(content)
        several = {name: [value] for name, value in found["headers"].items()}
        several |= found["multiValueHeaders"]
        headers = [
            (name, value)
            for name, values in several.items()
            for value in values
            if name != "content-length"
        ]
        return httpx2.Response(found["statusCode"], headers=headers, content=content)

    def _is_binary(self, media_type: str) -> bool:
        first = media_type.partition(",")[0].partition(";")[0].strip()
        return any(fnmatchcase(first, pattern) for pattern in self._binary)

    async def aclose(self) -> None:
        await self._stream.aclose()
