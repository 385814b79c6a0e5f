"""Which Redis the environment names. Imports no client."""

from collections.abc import Mapping
from urllib.parse import quote, urlsplit, urlunsplit


def redis_url_of(environ: Mapping[str, str]) -> str | None:
    """REDIS_URL, with REDIS_PASSWORD where the URL holds none; None where it is not set.

    Vaults hand out a password by itself, and the rest of the URL is no secret.
    """
    url, password = environ.get("REDIS_URL") or None, environ.get("REDIS_PASSWORD", "")
    if url is None or not password:
        return url
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.password is not None:
        return url
    user, _, address = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{address}"))


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, address = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{address}"))
