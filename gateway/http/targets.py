"""The target of a request in its plain form: a path without a trailing slash."""

import re
from urllib.parse import unquote

from starlette.types import Scope

_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/.*|)", re.IGNORECASE | re.DOTALL)


def plain_target(scope: Scope) -> Scope:
    """Returns the request with only the path as its target. If the target names scheme and host, as
    from some proxies, these take precedence over the Host header (RFC 9112, section 3.2.2)."""
    path: str = scope["path"]
    changes: dict[str, object] = {}
    absolute = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if absolute is not None:
        raw = absolute[2] or b"/"
        path = unquote(raw.decode("ascii"))
        headers = [pair for pair in scope["headers"] if pair[0] != b"host"]
        changes = {"raw_path": raw, "headers": [(b"host", absolute[1]), *headers]}
    if len(path) > 1 and path.endswith("/"):
        path = path.rstrip("/") or "/"
    return scope if path == scope["path"] and not changes else {**scope, **changes, "path": path}
