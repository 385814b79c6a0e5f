"""Waits until a gateway and the workers behind it are ready, and then says how to call it."""

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from contract.catalogue import Catalogue
from contract.connection import connect
from contract.endpoints import Endpoint
from contract.errors import BatchwayError
from contract.keys import Keys
from contract.model_cards import ModelCard

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_REMIND_EVERY_S = 30.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104


class _Ready(msgspec.Struct):
    workers: dict[str, int]


def reachable_host(host: str) -> str:
    """An address at which a server bound to `host` is reachable on this machine."""
    return _WILDCARDS.get(host, host)


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def until_ready(
    host: str,
    port: int,
    allowed_hosts: Sequence[str],
    models: Sequence[str],
    failed: Collection[str],
    tell: Callable[[str], None],
) -> list[str]:
    """Waits until /readyz shows a live worker of some model and the other models have one or have
    failed. Returns the models with one. Tells of each if there are several, and every half minute
    what is missing. `allowed_hosts`: the host names that the gateway accepts, if restricted."""
    address = reachable_host(host)
    is_allowed = not allowed_hosts or {"*", address} & set(allowed_hosts)
    name = in_url(address if is_allowed else allowed_hosts[0])
    remind_at = time.monotonic() + _REMIND_EVERY_S
    missing = list(models)
    while True:
        live = await asyncio.to_thread(_live_workers, address, port, name)
        for model in [model for model in missing if live.get(model)]:
            missing.remove(model)
            if len(models) > 1:
                tell(f"model {model!r} is ready ({len(models) - len(missing)} of {len(models)})")
        ready = [model for model in models if model not in missing]
        if ready and all(model in failed for model in missing):
            return ready
        if time.monotonic() >= remind_at:
            tell(f"still waiting for a worker of {', '.join(map(repr, missing))} to be ready")
            remind_at += _REMIND_EVERY_S
        await asyncio.sleep(_POLL_S)


def _live_workers(address: str, port: int, name: str) -> dict[str, int]:
    """The number of live workers by model; empty without an answer or while none is ready. Blocks,
    for a few seconds at most."""
    connection = http.client.HTTPConnection(address, port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz", headers={"Host": f"{name}:{port}"})
        answer = connection.getresponse()
        if answer.status == 200:
            return msgspec.json.decode(answer.read(), type=_Ready).workers
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        pass
    finally:
        connection.close()
    return {}


# --- how to call it ----------------------------------------------------------------------------

_CARD_TIMEOUT_S = 1.0
# The demo model knows the answer.
_CHAT = {"temperature": 0, "messages": [{"role": "user", "content": "Count from 1 to 10."}]}
_TEXT = "Cats sleep a lot."
_FIELDS: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: _CHAT,
    Endpoint.EMBEDDINGS: {"input": _TEXT},
    Endpoint.RERANK: {"query": "What sleeps?", "documents": ["Stones wait.", _TEXT]},
    Endpoint.CLASSIFY: {"input": _TEXT},
}
_PAIRS = {"input": [["What sleeps?", _TEXT]]}
_IN_PYTHON = {  # what the official client has
    Endpoint.CHAT: "chat.completions.create({}).choices[0].message.content",
    Endpoint.EMBEDDINGS: "embeddings.create({}).data[0].embedding",
}


async def card_of(redis_url: str, namespace: str, model: str) -> ModelCard | None:
    """Reads a model's card; None without an answer."""
    keys = Keys(namespace)
    with contextlib.suppress(BatchwayError):
        async with connect(redis_url, keys, command_timeout_s=_CARD_TIMEOUT_S) as client:
            return await Catalogue(client, keys).model(model)
    return None


def welcome(url: str, models: Sequence[str], card: ModelCard | None, *, has_key: bool) -> str:
    """The text, with a call of the first model. Names the variable of an API key, never the key."""
    endpoint = Endpoint.CHAT if card is None else card.endpoints[0]
    needs_pairs = card is not None and card.pooling is not None and card.pooling.needs_pairs
    fields = _PAIRS if needs_pairs else _FIELDS[endpoint]
    body = json.dumps({"model": models[0], **fields})
    header = ' -H "authorization: Bearer $BATCHWAY_API_KEY"' if has_key else ""
    served = (
        f"model {models[0]!r}" if len(models) == 1 else f"models {', '.join(map(repr, models))}"
    )
    return f"""
batchway is ready: {url} serves the {served}

  curl {url}{endpoint.value}{header} -H 'content-type: application/json' -d '{body}'
{_python(url, models[0], endpoint, has_key=has_key)}
or in a browser: {url} has a chat box, {url}/console shows the fleet

Ctrl-C ends it.
"""


def _python(url: str, model: str, endpoint: Endpoint, *, has_key: bool) -> str:
    """An example in Python; '' if the official client has no such call."""
    if endpoint not in _IN_PYTHON:
        return ""
    key = 'os.environ["BATCHWAY_API_KEY"]' if has_key else '"none"'
    imports = "import openai, os" if has_key else "import openai"
    fields = {"model": model, **_FIELDS[endpoint]}
    asked = ", ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    return f"""
or in Python:

  {imports}; client = openai.OpenAI(base_url="{url}/v1", api_key={key})
  print(client.{_IN_PYTHON[endpoint].format(asked)})
"""
