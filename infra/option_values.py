"""Parsers of the command line's option values."""

import argparse
import math
import re
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

import msgspec
from redis.exceptions import RedisError

from contract.connection import connect
from contract.keys import Keys
from contract.payloads import open_store
from workers.settings import LANES
from workers.supervisor.drain import SpotNotice

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    wanted = f"an integer of at least {minimum}" if maximum is None else f"{minimum} to {maximum}"

    def parse(raw: str) -> int:
        try:
            value = int(raw)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {raw!r}")
        return value

    return parse


def number(
    *, may_be_zero: bool, least: float = 0.0, most: float = math.inf
) -> Callable[[str], float]:
    """Parses finite numbers, positive or non-negative, within these bounds."""
    wanted = "a number of at least 0" if may_be_zero else "a number over 0"
    wanted = f"a number of at least {least:g}" if least else wanted
    wanted += f", at most {most:g}" if most < math.inf else ""

    def parse(raw: str) -> float:
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        is_zero_refused = value == 0 and not may_be_zero
        if not math.isfinite(value) or not least <= value <= most or is_zero_refused:
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {raw!r}")
        return value

    return parse


def lengths(raw: str) -> tuple[int, int]:
    """`N` or `LOW:HIGH`, in tokens."""
    parts = raw.split(":")
    try:
        low, high = int(parts[0]), int(parts[-1])
    except ValueError:
        low, high = 0, 0
    if len(parts) > 2 or not 1 <= low <= high:
        raise argparse.ArgumentTypeError(
            f"must be N or LOW:HIGH, integers of at least 1, not {raw!r}"
        )
    return low, high


def http_url(raw: str) -> str:
    if urlsplit(raw).scheme not in ("http", "https") or not urlsplit(raw).hostname:
        raise argparse.ArgumentTypeError(f"must begin with http:// or https://, not {raw!r}")
    return raw


def host_and_port(raw: str) -> str:
    host, _, port = raw.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, not {raw!r}")
    return raw


def redis_url(raw: str) -> str:
    """A URL that redis-py accepts. Errors never quote it: it may hold a password."""
    try:
        if urlsplit(raw).scheme not in ("redis", "rediss", "unix"):
            raise argparse.ArgumentTypeError(
                "must begin with redis://, rediss:// (TLS) or unix:// (a socket)"
            )
        connect(raw, Keys("x")).connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError):
        form = "redis://USER:PASSWORD@HOST:PORT/DATABASE or unix:///PATH, with %XX for other signs"
        raise argparse.ArgumentTypeError(f"must be {form}") from None
    return raw


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Takes values for which `check` raises no ValueError; its message is shown."""

    def parse(raw: str) -> str:
        try:
            check(raw)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc
        return raw

    return parse


object_store, namespace, spot_notice = checked(open_store), checked(Keys), checked(SpotNotice)


def json_object(raw: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as exc:
        raise argparse.ArgumentTypeError(
            f'must be a JSON object, as {{"enable_thinking": false}}, not {raw!r}'
        ) from exc


def engine_argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def model_name(raw: str) -> str:
    if not _MODEL_NAME.fullmatch(raw):
        raise argparse.ArgumentTypeError(
            f"must be at most 128 letters, digits and ._/- that begin with one of the first "
            f"two, not {raw!r}"
        )
    return raw


def device(raw: str) -> str:
    if not _DEVICE.fullmatch(raw):
        raise argparse.ArgumentTypeError(f"must be auto, cpu, cuda or cuda:N, not {raw!r}")
    return raw


def names_of(allowed: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Parses different names out of the allowed ones, separated by commas."""

    def parse(raw: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in raw.split(","))
        if not set(names) <= set(allowed) or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(
                f"must be different names out of {','.join(allowed)}, not {raw!r}"
            )
        return names

    return parse


lanes = names_of(LANES)
