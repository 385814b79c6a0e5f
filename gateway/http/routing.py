"""How a request finds its endpoint, and how that is called. FastAPI describes the routes: it reads
their paths and arguments into the OpenAPI document, and tells apart paths with parameters.

It does not call them: its solver of dependencies takes 300 calls of Python for each request before
an endpoint hears of it (docs/decisions/first-token.md).
"""

import difflib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.auth import Admission, check_has_room
from gateway.http.concurrency_cap import ConcurrencyCap
from gateway.http.errors import ApiError

_MAX_PATH = 128  # characters, in a message
# What OpenAI has and this server has not, by the start of its paths.
_ELSEWHERE = {
    "/v1/responses": "no Responses API; POST /v1/chat/completions answers conversations",
    "/v1/embeddings": "no embeddings",
    "/v1/batches": "no Batch API; POST /v1/jobs queues a call that nobody waits for",
    "/v1/files": "no files; POST /v1/jobs queues a call that nobody waits for",
    "/v1/assistants": "no assistants; POST /v1/chat/completions answers conversations",
    "/v1/threads": "no threads; POST /v1/chat/completions answers conversations",
    "/v1/images": "no images, text only",
    "/v1/audio": "no audio, text only",
    "/v1/moderations": "no moderation",
    "/v1/fine_tuning": "no training",
}


class Route(APIRoute):
    """Calls its endpoint with the request, with the caller where it asks for one, and with the
    parameters of the path; then sends the response.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._admission = _admission_of(endpoint)
        self.app = self.answer

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what the endpoint raises; where it asks for a caller, also what its admission and
        `check_has_room` raise. The caller is counted until its answer is sent.
        """
        request = Request(scope, receive, send)
        parameters: dict[str, str] = scope.get("path_params", {})
        if self._admission is None:
            response: Response = await self.endpoint(request, **parameters)
            await response(scope, receive, send)
            return
        caller = await self._admission(request)
        calls: ConcurrencyCap = request.app.state.calls_of_keys
        check_has_room(calls, caller)
        calls.enter(caller.key_name)
        try:
            response = await self.endpoint(request, caller, **parameters)
            await response(scope, receive, send)
        finally:
            calls.leave(caller.key_name)


class Routes:
    """Those of the router. A path without parameters is looked up; the router tries the others one
    after the other, and knows what to say of a path or a method that there is not.
    """

    def __init__(self, router: APIRouter) -> None:
        self._router = router
        self._by_path = {
            (method, route.path): route
            for route in router.routes
            if isinstance(route, Route) and not route.param_convertors
            for method in route.methods or ()
        }

        router.default = self._no_such_path

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        route = self._by_path.get((scope["method"], scope["path"]))
        if route is None:
            return self._router(scope, receive, send)
        scope["route"] = route
        return route.answer(scope, receive, send)

    async def _no_such_path(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"][:_MAX_PATH]
        known = {path for _, path in self._by_path}
        message = f"there is no {path} here"
        for start, hint in _ELSEWHERE.items():
            if path.startswith(start):
                raise ApiError(404, "not_found", f"{message}: {hint}")
        if "/v1" + path.removeprefix("/v1").removesuffix("/") in known:
            similar = ["/v1" + path.removeprefix("/v1").removesuffix("/")]
        else:
            similar = difflib.get_close_matches(path, sorted(known), n=1)
        if similar:
            raise ApiError(404, "not_found", f"{message}; did you mean {similar[0]}?")
        raise ApiError(404, "not_found", f"{message}; GET /openapi.json lists the routes")


def _admission_of(endpoint: Callable[..., Any]) -> Admission | None:
    """What an endpoint asks of its caller, by the type of that argument; None: it has no such."""
    for parameter in inspect.signature(endpoint).parameters.values():
        for mark in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(mark, Depends) and isinstance(mark.dependency, Admission):
                return mark.dependency
    return None
