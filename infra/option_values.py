"""The values of the command line's options: each parsed and checked before anything is started."""

import argparse
import math
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from contract.keys import Keys
from payloads.opening import open_store
from workers.settings import LANES
from workers.spot_notice import BadNoticeSource, SpotNotice

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A parser of integers in a range."""
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


def number(*, may_be_zero: bool) -> Callable[[str], float]:
    """A parser of finite numbers, positive or not negative."""
    wanted = "a number of at least 0" if may_be_zero else "a number over 0"

    def parse(raw: str) -> float:
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {raw!r}")
        return value

    return parse


def redis_url(raw: str) -> str:
    """A URL that redis-py understands. It may hold a password: never quoted back."""
    if urlsplit(raw).scheme not in ("redis", "rediss", "unix"):
        raise argparse.ArgumentTypeError(
            "must begin with redis://, rediss:// (TLS) or unix:// (a socket)"
        )
    return raw


def object_store(raw: str) -> str:
    try:
        open_store(raw)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return raw


def namespace(raw: str) -> str:
    try:
        return Keys(raw).namespace
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def model_name(raw: str) -> str:
    if not _MODEL_NAME.fullmatch(raw):
        raise argparse.ArgumentTypeError(
            f"must be at most 128 letters, digits and ._/- that begin with one of the first "
            f"two, not {raw!r}"
        )
    return raw


def lanes(raw: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in raw.split(","))
    unknown = [name for name in names if name not in LANES]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"must be different names out of {','.join(LANES)}, not {raw!r}"
        )
    return names


def spot_notice(raw: str) -> str:
    try:
        SpotNotice(raw)
    except BadNoticeSource as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return raw
