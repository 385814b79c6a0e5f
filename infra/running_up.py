"""Finds this user's running `batchway up`, for commands without a Redis URL.

`up` with a private Redis writes a note beside the server's socket, in a directory that only its
user can read and that is removed with the server.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

_NOTE = "up.json"


class RunningUp(msgspec.Struct, frozen=True):
    """One running `batchway up`."""

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


_QUESTION = "Count from 1 to 10."  # the demo model knows the answer


def welcome(url: str, models: Sequence[str], *, has_key: bool) -> str:
    """The text, with calls of the first model; names the variable of an API key, never the key."""
    model = models[0]
    messages = [{"role": "user", "content": _QUESTION}]
    body = json.dumps({"model": model, "temperature": 0, "messages": messages})
    header = ' -H "authorization: Bearer $BATCHWAY_API_KEY"' if has_key else ""
    key = 'os.environ["BATCHWAY_API_KEY"]' if has_key else '"none"'
    imports = "import openai, os" if has_key else "import openai"
    asked = f'model="{model}", temperature=0, messages={json.dumps(messages)}'
    served = f"model {model!r}" if len(models) == 1 else f"models {', '.join(map(repr, models))}"
    return f"""
batchway is ready: {url} serves the {served}

  curl {url}/v1/chat/completions{header} -H 'content-type: application/json' -d '{body}'

or in Python:

  {imports}; client = openai.OpenAI(base_url="{url}/v1", api_key={key})
  print(client.chat.completions.create({asked}).choices[0].message.content)

Ctrl-C ends it.
"""
