"""How a request finds its endpoint, and how that is called. FastAPI describes the routes: it reads
their paths and arguments into the OpenAPI document, and tells apart paths with parameters.

It does not call them: its solver of dependencies takes 300 calls of Python for each request before
an endpoint hears of it (docs/decisions/first-token.md).
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.auth import Admission, check_has_room
from gateway.tally import Tally


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
        calls: Tally = request.app.state.calls_of_keys
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

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        route = self._by_path.get((scope["method"], scope["path"]))
        if route is None:
            return self._router(scope, receive, send)
        scope["route"] = route
        return route.answer(scope, receive, send)


def _admission_of(endpoint: Callable[..., Any]) -> Admission | None:
    """What an endpoint asks of its caller, by the type of that argument; None: it has no such."""
    for parameter in inspect.signature(endpoint).parameters.values():
        for mark in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(mark, Depends) and isinstance(mark.dependency, Admission):
                return mark.dependency
    return None
