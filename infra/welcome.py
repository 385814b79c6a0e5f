"""The text that `batchway up` prints once it serves: a call that its first model answers."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from contract.catalogue import Catalogue
from contract.connection import connect
from contract.endpoints import Endpoint
from contract.errors import BatchwayError
from contract.keys import Keys
from contract.model_cards import ModelCard

_TIMEOUT_S = 1.0
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
    with contextlib.suppress(BatchwayError):
        async with connect(redis_url, command_timeout_s=_TIMEOUT_S) as client:
            return await Catalogue(client, Keys(namespace)).model(model)
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
