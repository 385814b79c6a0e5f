"""`batchway keys`: creates, lists, revokes and rotates API keys.

Only the new key goes to standard output. Redis stores only its digest, so a key that is not saved
then is lost.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from contract.api_keys import (
    DEFAULT_SCOPES,
    MIN_RETENTION_S,
    ApiKey,
    ApiKeys,
    KeyTerms,
    Pepper,
    Scope,
)
from contract.connection import connect
from contract.jobs import MAX_WEIGHT, MIN_WEIGHT
from contract.keys import Keys
from infra import options as opts
from infra.option_values import lanes, names_of, number
from infra.options import Option, Value
from infra.preconditions import Failed
from infra.tables import date, table, write

PEPPER_VARIABLE = "BATCHWAY_KEY_PEPPER"
ACTIONS = ("create", "list", "revoke", "rotate")
_COLUMNS = ("prefix", "state", "tenant", "scopes", "lanes", "limits", "created", "expires")

_NO_LIMIT = "no limit"
_EXPIRES = Option(
    "days until the new key ends by itself",
    Value(number(may_be_zero=False), "DAYS"),
    shown="never",
)
_OVERLAP = Option("how long the old key still works", opts.SECONDS_OR_ZERO, 86_400.0)
_TERMS = {
    "scopes": Option(
        f"what it permits, out of {','.join(Scope)}",
        Value(names_of(tuple(Scope)), "NAMES"),
        DEFAULT_SCOPES,
    ),
    "lanes": Option("lanes it may use", Value(lanes, "NAMES"), (), "all"),
    "requests_per_minute": Option("requests a minute, of the tenant", opts.COUNT, 0, _NO_LIMIT),
    "tokens_per_minute": Option(
        "tokens a minute (prompts and output), of the tenant", opts.COUNT, 0, _NO_LIMIT
    ),
    "concurrent_tokens": Option(
        "tokens of unfinished jobs at a time, of the tenant", opts.COUNT, 0, _NO_LIMIT
    ),
    "lane_share": Option(
        "the largest share of a lane's waiting tokens that the tenant may have, over 0 to 1",
        Value(number(may_be_zero=False, most=1), "SHARE"),
        0,
        _NO_LIMIT,
    ),
    "weight": Option(
        "the tenant's share of a lane's tokens and places, relative to the weights of other "
        "tenants, 0.01 to 100",
        Value(number(may_be_zero=False, least=MIN_WEIGHT, most=MAX_WEIGHT), "NUMBER"),
        1.0,
    ),
    "retention_s": Option(
        "how long the tenant's jobs are kept after their end, unless a job sets its own time; "
        "within the gateway's bound",
        Value(number(may_be_zero=False, least=MIN_RETENTION_S), "SECONDS"),
        0,
        "the gateway's",
    ),
    "expires": _EXPIRES,
}


# --- options ----------------------------------------------------------------------------------


def add_keys_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = opts.add_action(actions, "create", "create a key and print it, this once")
    create.add_argument(
        "--tenant",
        required=True,
        metavar="NAME",
        help="the key's tenant, which owns jobs, quotas and a fair share (default: refused)",
    )
    opts.add_options(create, _TERMS)
    opts.add_action(actions, "list", "list all keys, without the keys themselves")
    revoke = opts.add_action(actions, "revoke", "end a key; every gateway refuses it within 5 s")
    _add_prefix(revoke)
    rotate = opts.add_action(
        actions, "rotate", "create a key on the same terms; the old one expires"
    )
    _add_prefix(rotate)
    opts.add_options(rotate, {"overlap_s": _OVERLAP, "expires": _EXPIRES})


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", metavar="PREFIX", help="the 8 characters after `bw-`")


# --- actions ----------------------------------------------------------------------------------


def run_keys(options: argparse.Namespace, redis_url: str) -> int:
    """Runs one action; returns the exit status. Raises Failed, BrokerUnavailable, ValueError."""
    raw = os.environ.get(PEPPER_VARIABLE, "")
    if raw and len(raw) < 16:
        raise ValueError(f"{PEPPER_VARIABLE} must have at least 16 characters")
    asyncio.run(_run(options, redis_url, Pepper(raw.encode()) if raw else None))
    return 0


async def keys_exist(redis_url: str, namespace: str) -> bool:
    """Whether an installation has an API key. Raises BrokerUnavailable."""
    keys = Keys(namespace)
    async with connect(redis_url, keys) as client:
        return await ApiKeys(client, keys).exist()


async def _run(options: argparse.Namespace, redis_url: str, pepper: Pepper | None) -> None:
    actions: dict[str, Callable[[ApiKeys, argparse.Namespace], Awaitable[None]]]
    actions = {"create": _create, "list": _list, "revoke": _revoke, "rotate": _rotate}
    keys = Keys(options.namespace)
    async with connect(redis_url, keys) as client:
        await actions[options.action](ApiKeys(client, keys, pepper), options)


async def _create(api_keys: ApiKeys, options: argparse.Namespace) -> None:
    terms = msgspec.convert(vars(options), KeyTerms)
    key, prefix = await api_keys.create(terms, lifetime_s=_lifetime_s(options))
    await _show_new(api_keys, options, key, prefix)


async def _list(api_keys: ApiKeys, options: argparse.Namespace) -> None:
    shown = [_shown(key) for key in await api_keys.all()]
    write({"keys": shown}, table([_COLUMNS, *(_row(key) for key in shown)]), options.json)


async def _revoke(api_keys: ApiKeys, options: argparse.Namespace) -> None:
    if not await api_keys.revoke(options.prefix):
        raise Failed(f"there is no key {options.prefix!r}")
    record = await api_keys.find(options.prefix)
    assert record is not None
    write({"key": _shown(record)}, f"{options.prefix} is revoked", options.json)


async def _rotate(api_keys: ApiKeys, options: argparse.Namespace) -> None:
    made = await api_keys.rotate(
        options.prefix, overlap_s=options.overlap_s, lifetime_s=_lifetime_s(options)
    )
    if made is None:
        raise Failed(f"there is no active key {options.prefix!r}")
    print(f"{options.prefix} works for {options.overlap_s:g} s more at most", file=sys.stderr)
    await _show_new(api_keys, options, *made)


async def _show_new(api_keys: ApiKeys, options: argparse.Namespace, key: str, prefix: str) -> None:
    record = await api_keys.find(prefix)
    assert record is not None
    print(f"a key of tenant {record.terms.tenant}, shown this once:", file=sys.stderr)
    write({"api_key": key, "key": _shown(record)}, key, options.json)


def _lifetime_s(options: argparse.Namespace) -> float | None:
    return None if options.expires is None else options.expires * 86_400


# --- what is shown ----------------------------------------------------------------------------


def _shown(key: ApiKey) -> dict[str, Any]:
    terms = key.terms
    return {
        "prefix": key.prefix,
        "state": key.state,
        "tenant": terms.tenant,
        "scopes": list(terms.scopes),
        "lanes": list(terms.lanes),
        "requests_per_minute": terms.requests_per_minute or None,
        "tokens_per_minute": terms.tokens_per_minute or None,
        "concurrent_tokens": terms.concurrent_tokens or None,
        "lane_share": terms.lane_share or None,
        "weight": terms.weight,
        "retention_s": terms.retention_s or None,
        "created_at": key.created_ms / 1000,
        "expires_at": None if key.expires_ms is None else key.expires_ms / 1000,
        "revoked_at": None if key.revoked_ms is None else key.revoked_ms / 1000,
    }


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    units = {
        "requests_per_minute": "requests/min",
        "tokens_per_minute": "tokens/min",
        "concurrent_tokens": "tokens at a time",
        "lane_share": "of a lane",
        "retention_s": "s kept",
    }
    limits = [f"{key[name]:.10g} {unit}" for name, unit in units.items() if key[name]]
    if key["weight"] != 1:
        limits.append(f"weight {key['weight']:.10g}")
    return (
        key["prefix"],
        key["state"],
        key["tenant"],
        ",".join(key["scopes"]),
        ",".join(key["lanes"]) or "all",
        ", ".join(limits) or "none",
        date(key["created_at"]),
        date(key["expires_at"]),
    )
