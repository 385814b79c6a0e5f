"""Checks before a command starts anything: packages, the model, Redis, the object store."""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec
import redis.asyncio

from contract.catalogue import known_store
from contract.connection import connect
from contract.errors import BrokerUnavailable, BrokerUnfit
from contract.keys import Keys
from contract.library import check_fitness
from contract.partitions import made_number
from contract.payloads import open_store
from contract.payloads.directory import DirectoryStore
from contract.payloads.store import PayloadUnavailable
from infra import options as opts

_NOTE = "up.json"


class RunningUp(msgspec.Struct, frozen=True):
    """One running `batchway up`. With a private Redis it writes this note beside the server's
    socket, in a directory that only its user can read and that is removed with the server.
    """

    pid: int
    redis_url: str
    namespace: str
    gateway_url: str


def write_note(directory: Path, up: RunningUp) -> None:
    """Writes the note. `directory` contains the server's socket."""
    (directory / _NOTE).write_bytes(msgspec.json.encode(up))


def running_ups() -> list[RunningUp]:
    """This user's running `batchway up` processes that have a private Redis: those of TMPDIR, or
    else of /tmp, where the socket is if TMPDIR's path is too long for one."""
    return _noted_in(tempfile.gettempdir()) or _noted_in("/tmp")  # noqa: S108 - only reads ours


def _noted_in(folder: str) -> list[RunningUp]:
    found = {}
    for note in Path(folder).glob(f"batchway-*/{_NOTE}"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if note.parent.lstat().st_uid != os.getuid():
                continue
            up = msgspec.json.decode(note.read_bytes(), type=RunningUp)
            os.kill(up.pid, 0)
            found[up.pid] = up
    return [found[pid] for pid in sorted(found)]


_NEEDS = {  # modules that show whether an extra is installed
    "gateway": ("fastapi", "uvicorn", "tokenizers", "jinja2", "prometheus_client"),
    "callbacks": ("rq", "httpx"),
    "worker": ("torch", "transformers", "gguf", "tokenizers", "numpy", "prometheus_client"),
    "bench": ("httpx", "matplotlib"),
    "top": ("prometheus_client", "rich"),
}
_NEEDS["serve"] = _NEEDS["gateway"] + _NEEDS["worker"] + _NEEDS["callbacks"]


class UsageError(Exception):
    """Options that cannot work. The message is one sentence."""


class Failed(Exception):
    """What was asked for cannot be done. The message is one sentence."""


def check_extra(extra: str) -> None:
    """Raises UsageError if the modules of an extra are not installed."""
    needs = dict.fromkeys(_NEEDS[extra])
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not installed: run `pip install 'batchway[{extra}]'`"
        )


def check_redis(url: str, namespace: str) -> None:
    """Raises UsageError if Redis could lose jobs. An unreachable Redis is checked later."""
    _check(url, namespace, check_fitness)


def check_partitions(url: str, namespace: str, given: int | None) -> None:
    """Raises UsageError if the namespace has another number of partitions than the given one. An
    unreachable Redis is checked later."""
    _check(url, namespace, lambda client: made_number(client, Keys(namespace), given))


def _check(
    url: str, namespace: str, ask: Callable[[redis.asyncio.Redis], Awaitable[object]]
) -> None:
    async def check() -> None:
        async with connect(url, Keys(namespace)) as client:
            await ask(client)

    try:
        asyncio.run(check())
    except BrokerUnfit as exc:
        raise UsageError(str(exc)) from exc
    except BrokerUnavailable:
        return


def check_directory(setting: str) -> None:
    """Raises UsageError if the object store's directory cannot be created or written."""
    store = open_store(setting)
    if isinstance(store, DirectoryStore):
        try:
            _ = store.name
        except PayloadUnavailable as exc:
            raise UsageError(f"--object-store {setting}: {exc}") from exc


def check_flows_file(path: str, served: Collection[str] = ()) -> None:
    """Raises UsageError if a models.yaml is wrong. `served`: the names of all models beside its
    flows, where they are known; what they can do is checked once they are published."""
    if not path:
        return
    from gateway.runners.flows.definitions import FlowError, load_flows, members  # needs YAML

    try:
        definitions = load_flows(Path(path))
    except FlowError as exc:
        raise UsageError(f"--models: {exc}") from exc
    known = {*served, *definitions}
    for name, definition in definitions.items() if served else ():
        for place, model in members(definition):
            if model not in known:
                there = ", ".join(sorted(known - {name}))
                raise UsageError(
                    f"--models: {path}: {name}: {place}: there is no model {model!r}; there are: "
                    f"{there}"
                )


def make_folder(options: argparse.Namespace) -> None:
    """Replaces a model that is a GGUF file, or SmolLM2, by its folder, made if it is not there; its
    name in requests stays. Raises UsageError, and argparse.ArgumentTypeError for that name."""
    from workers.engine.interface import ModelRefused
    from workers.model.gguf_cache import made_folder

    try:
        folder = made_folder(options.model, options.dtype)
    except ModelRefused as exc:
        raise UsageError(f"--model: {exc}") from exc
    if folder != options.model:
        options.served_model_name = opts.served_name(options)
        options.model = folder


def check_model(model: str) -> None:
    """Raises UsageError if the model is not found."""
    from workers.engine.interface import ModelRefused
    from workers.model.model_path import check_on_hub, check_place

    try:
        check_place(model)
        check_on_hub(model)
    except ModelRefused as exc:
        raise UsageError(f"--model: {exc}") from exc


def check_store(url: str, namespace: str, setting: str) -> None:
    """Raises UsageError if the namespace uses another object store. An unreachable store or Redis
    is checked on later reads."""

    async def check(own: str) -> str:
        async with connect(url, keys) as client:
            return await known_store(client, keys, own)

    keys, store = Keys(namespace), open_store(setting)
    try:
        own = "" if store is None else store.name
        known = asyncio.run(check(own))
    except (BrokerUnavailable, PayloadUnavailable):
        return
    if known != own:
        raise UsageError(
            f"the namespace {namespace!r} keeps its objects in {known}, but this process was given "
            f"{own or 'no object store'}: give all processes the same --object-store"
        )


def known_redis(options: argparse.Namespace) -> str:
    """Returns the given URL. Raises UsageError."""
    if options.redis_url is None:
        raise UsageError("no Redis given: set the variable REDIS_URL, or give --redis-url")
    return str(options.redis_url)


def operators_redis(options: argparse.Namespace) -> str:
    """The given URL, or that of the running `batchway up` and its namespace. Raises UsageError."""
    if options.redis_url is not None:
        return str(options.redis_url)
    up = running_up()
    if up is None:
        raise UsageError(
            "no Redis given, and no `batchway up` of yours with its own Redis runs here: set the "
            "variable REDIS_URL, or give --redis-url"
        )
    if options.namespace == opts.DEFAULT_NAMESPACE:
        options.namespace = up.namespace
    return up.redis_url


def running_up() -> RunningUp | None:
    """This user's running `batchway up`, or None. Raises UsageError if there are several."""
    ups = running_ups()
    if len(ups) > 1:
        each = ", ".join(f"{up.redis_url} (at {up.gateway_url})" for up in ups)
        raise UsageError(f"several `batchway up` run; give --redis-url, or `top` its --url: {each}")
    return ups[0] if ups else None
