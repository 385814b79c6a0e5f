"""A real engine process with a model that works as coding agents ask it to: it reads a file by a
tool, edits it by another, and answers, in Qwen3's format: `python -m tests.clients.agent_engine
--fd N --options JSON`.

The task is in the user's message: "In the file PATH replace OLD by NEW." The tools are found by
what they are called and take, so that each agent's own serve.
"""

import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from contract.jobs import SamplingParams
from tests.clients.thinking_engine import TOOL, ThinkingModel
from tests.real.families import QWEN3
from tests.real.scripted_engine import load_scripted_model
from workers.engine_process import engine_loop as engine_process

CONTEXT_LENGTH = 65_536
THOUGHT = "The user wants a file changed."
_TASK = re.compile(r"In the file (\S+) replace (\w+) by (\w+)\.")
_RESULT = "<tool_response>"
# A part of a tool's name -> what its parameters are called, without marks between words.
_READERS = {"read": ("path",), "shell": ("command",), "exec": ("cmd",)}
_EDITORS = {
    "edit": ("path", "old", "new"),
    "replace": ("path", "old", "new"),
    **{name: fields for name, fields in _READERS.items() if name != "read"},
}


class AgentModel(ThinkingModel):
    """Reads, edits and answers, one step for each result of a tool."""

    def text_of(self, prompt: str, params: SamplingParams) -> str:
        answer = _answer(prompt)
        if prompt.endswith("</think>\n\n"):  # its caller wants no reasoning
            return answer
        assert QWEN3.think is not None
        return QWEN3.think(THOUGHT, answer)


def _answer(prompt: str) -> str:
    tasks = list(_TASK.finditer(prompt))
    functions = [json.loads(line)["function"] for line in TOOL.findall(prompt)]
    if not tasks or not functions:
        return "Hello."
    path, old, new = tasks[-1].groups()
    values = {"path": path, "old": old, "new": new}
    match prompt.count(_RESULT, tasks[-1].end()):
        case 0:
            return _call(functions, _READERS, values, f"cat {path}")
        case 1:
            return _call(functions, _EDITORS, values, f"sed -i s/{old}/{new}/ {path}")
    return f"I replaced {old} by {new} in {path}."


def _call(
    functions: list[dict[str, Any]],
    kinds: Mapping[str, tuple[str, ...]],
    values: dict[str, str],
    command: str,
) -> str:
    """A call of the first tool of these kinds."""
    for kind, words in kinds.items():
        for function in functions:
            fields = function["parameters"].get("properties", {})
            found = {word: [f for f in fields if word in f.lower()] for word in words}
            if kind not in function["name"].lower() or not all(found.values()):
                continue
            arguments: dict[str, Any] = {}
            for word, [name, *_] in found.items():
                value: Any = values.get(word, command)
                is_list = fields[name].get("type") == "array"
                arguments[name] = ["bash", "-c", value] if is_list else value
            return QWEN3.write("I use a tool.", [(function["name"], arguments)])
    return "I have no tool for it."


if __name__ == "__main__":
    sys.exit(engine_process.main(load=partial(load_scripted_model, kind=AgentModel)))
