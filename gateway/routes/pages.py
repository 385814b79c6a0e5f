"""The pages for people: the front door `/`, `/docs` and `/console`; the session of a browser, and
the feed by which the console is live. What the pages do with jobs they do by the API's routes.

The pages hold no data and need no key. Their scripts are the files of gateway/pages, and the
browser is told to run no others (Content-Security-Policy, level 3)."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response, StreamingResponse

from contract.api_keys import Scope
from gateway.follow.fleet import FleetWatch
from gateway.http import sse
from gateway.http.errors import ApiError
from gateway.prepare.admission import CSRF_HEADER, SESSION_COOKIE, AnyCaller, Caller
from gateway.redis.key_ring import SESSION_S, KeyRing, csrf_token
from gateway.routes.requests import GuardedRoute, open_to_all
from gateway.state import AcceptingGateway, Gateway

router = APIRouter(route_class=GuardedRoute, include_in_schema=False)

_PAGES = Path(__file__).parent.parent / "pages"
_ASSETS = {str(file.relative_to(_PAGES)): file for file in _PAGES.rglob("*") if file.is_file()}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FLEET_ONLY = (
    *("engines", "workers", "steps", "refusals", "deliveries", "callbacks", "lanes"),
    *("worker_price", "prices"),
)


@router.get("/")
@open_to_all
async def front() -> Response:
    """What this is, its models, and a box to chat with them."""
    return _page("front.html")


@router.get("/docs")
@open_to_all
async def documents() -> Response:
    """The OpenAPI document in a viewer."""
    return _page("docs.html")


@router.get("/console")
@open_to_all
async def console() -> Response:
    """The live console."""
    return _page("console.html")


@router.get("/assets/{name:path}")
@open_to_all
async def asset(name: str) -> Response:
    """A script, a style or an icon of the pages."""
    return _page(name)


def _page(name: str) -> Response:
    if name not in _ASSETS:
        raise HTTPException(404)
    return FileResponse(_ASSETS[name], headers=_HEADERS)


class Login(BaseModel):
    key: str


@router.get("/console/session")
async def session(request: Request, caller: AnyCaller) -> dict[str, Any]:
    """Who the browser is, and the token that its changes need."""
    return _session(caller, request.cookies.get(SESSION_COOKIE, ""))


@router.post("/console/session")
@open_to_all
async def log_in(request: Request, gateway: AcceptingGateway, login: Login) -> Response:
    """Exchanges an API key for a session of an hour, in a cookie that no script can read."""
    ring: KeyRing = request.app.state.key_ring
    found = await ring.begin_session(login.key.strip())
    terms = found and await ring.terms_of(found)
    if not found or not terms:
        raise ApiError(401, "invalid_api_key", "this is no valid API key")
    answer = sse.json_response(_session(Caller(terms, ""), found))
    answer.set_cookie(
        SESSION_COOKIE,
        found,
        max_age=int(SESSION_S),
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


@router.delete("/console/session")
async def log_out(request: Request, _caller: AnyCaller) -> Response:
    """Forgets the browser's session."""
    answer = Response(status_code=204)
    is_secure = request.url.scheme == "https"
    answer.delete_cookie(SESSION_COOKIE, secure=is_secure, httponly=True, samesite="strict")
    return answer


def _session(caller: Caller, found: str) -> dict[str, Any]:
    return {
        "tenant": caller.tenant,
        "is_admin": caller.has(Scope.ADMIN),
        "sees_fleet": caller.has(Scope.METRICS),
        "has_session": bool(found),
        "header": CSRF_HEADER,
        "token": csrf_token(found) if found else "",
    }


@router.get("/console/feed", response_class=StreamingResponse)
async def feed(request: Request, caller: AnyCaller, gateway: AcceptingGateway) -> Response:
    """The state of the fleet each second, or what the caller may see of it."""
    watch: FleetWatch = request.app.state.fleet_watch
    return await sse.sse_response(request, _events(watch, caller, gateway), headers={})


async def _events(
    watch: FleetWatch, caller: Caller, gateway: Gateway
) -> AsyncGenerator[bytes, None]:
    sees_fleet = caller.has(Scope.METRICS)
    points = {model: list(past) for model, past in watch.points.items()} if sees_fleet else {}
    yield sse.message(points, event="past")
    async for state in watch.states():
        yield sse.message(_seen(state, caller, watch), event="state")
        if gateway.drain.has_begun:
            return


def _seen(state: dict[str, Any], caller: Caller, watch: FleetWatch) -> dict[str, Any]:
    """What the caller may see: all with the scope `metrics`, else its own jobs and the models."""
    if caller.has(Scope.METRICS):
        newest = {model: past[-1] for model, past in watch.points.items() if past}
        return {**state, "newest": newest}
    shown = {name: value for name, value in state.items() if name not in _FLEET_ONLY}
    for name in ("held", "waiting"):
        shown[name] = [_own(row) for row in shown.get(name, ()) if row["tenant"] == caller.tenant]
    return shown


def _own(row: dict[str, Any]) -> dict[str, Any]:
    """A tenant learns no name of a host."""
    return {**row, "worker": row["worker"].rpartition("-")[2]} if "worker" in row else row
