"""A real engine process with a model that reasons before it answers, and calls tools, as Qwen3
writes both: `python -m tests.clients.thinking_engine --fd N --options JSON`.

Its answers to the clients' questions are made here, from the prompt alone, and written through the
product's own loader, chat template and masks.
"""

import json
import re
import sys
import time
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from contract.jobs import SamplingParams
from tests.real.families import QWEN3
from tests.real.scripted import ScriptedModel
from tests.real.scripted_engine import load_scripted_model
from workers.engine.interface import Chunk, Padding, Row
from workers.engine.masks import StepMasks
from workers.engine_process import engine_loop as engine_process

_STEP_S = 0.005
THOUGHT = "The user asks for numbers."  # no answer may hold it
_COUNT = re.compile(r"Count from 1 to (\d+)\.")
_SUM = re.compile(r"What is (\d+) \+ (\d+)\?")
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
TOOL = re.compile(r'^\{"type": "function".*\}$', re.MULTILINE)
_TURN = "<|im_start|>user\n"


class ThinkingModel(ScriptedModel):
    """Counts, and adds by a tool where it has one. Its steps take time, so that a stream has
    several events."""

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        time.sleep(_STEP_S)
        return super().run(chunks, padding, masks)

    def text_of(self, prompt: str, params: SamplingParams) -> str:
        answer = _answer(prompt, is_masked=bool(params.grammar))
        if prompt.endswith("</think>\n\n"):  # its caller wants no reasoning
            return answer
        assert QWEN3.think is not None
        return QWEN3.think(THOUGHT, answer)


def _answer(prompt: str, *, is_masked: bool) -> str:
    tools, question = TOOL.findall(prompt), prompt.rpartition(_TURN)[2]
    if results := _RESULT.findall(question):
        return str(results[-1])
    if counted := _COUNT.search(question):
        return ", ".join(map(str, range(1, int(counted[1]) + 1)))
    if added := _SUM.search(question):
        total = int(added[1]) + int(added[2])
        value = {"value": total}
        if not tools:
            return json.dumps(value) if is_masked else str(total)
        function: dict[str, Any] = json.loads(tools[0])["function"]
        summands = {"a": int(added[1]), "b": int(added[2])}
        arguments = summands if "a" in function["parameters"]["properties"] else value
        return QWEN3.write("", [(function["name"], arguments)])
    return "Hello."


if __name__ == "__main__":
    sys.exit(engine_process.main(load=partial(load_scripted_model, kind=ThinkingModel)))
