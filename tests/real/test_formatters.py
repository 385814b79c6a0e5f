"""Prompts and outputs agree with the formatters that makers of models publish."""

import base64
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.events import ToolCallDelta
from gateway.models.chat_template import ChatTemplate
from tests.real.cases import Answer, Case, cases_of
from tests.real.conversations import CONVERSATIONS
from tests.real.families import GPT_OSS
from tests.real.parts import FORMATTERS_PYTHON, needs_parts, tokenizer_folder
from tests.real.scripted import Vocabulary
from workers.output.formats import REASONING_FORMATS
from workers.output.parser import OutputParser

pytestmark = [pytest.mark.campaign, needs_parts]

PROGRAM = Path(__file__).parent / "formatters.py"
# Of others the template shows the system's message and results of calls in its own way.
MISTRALS = ("plain", "turns", "tools", "hard arguments", "answer after a call")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """By title, the conversations and completions as the formatters see them."""
    folder = tmp_path_factory.mktemp("encodings")
    harmony = Tokenizer.from_file(str(tokenizer_folder("gptoss") / "tokenizer.json"))
    write_vocabulary(harmony, folder / "o200k_base.tiktoken")
    questions: dict[str, Any] = {
        f"mistral {title}": {"mistral": _request(title)} for title in MISTRALS
    } | {
        case.title: {"harmony": harmony.encode(case.says, add_special_tokens=False).ids}
        for case in HARMONIES
    }
    done = subprocess.run(
        [FORMATTERS_PYTHON, PROGRAM],
        input=json.dumps(list(questions.values())),
        env={**os.environ, "ENCODINGS": str(folder), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(questions, json.loads(done.stdout), strict=True))


def write_vocabulary(tokenizer: Tokenizer, file: Path) -> None:
    """In tiktoken's format, which openai-harmony would download."""
    tokens = Vocabulary(tokenizer, 0).bytes_of
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    lines = [f"{base64.b64encode(tokens[i]).decode()} {i}\n" for i in range(size)]
    file.write_text("".join(lines))


def _request(title: str) -> dict[str, Any]:
    conversation = CONVERSATIONS[title]
    return {"messages": conversation.messages, "tools": conversation.tools}


HARMONIES = [
    case
    for case in cases_of(GPT_OSS)
    if isinstance(case.expected, Answer)
    and not case.title.startswith(("choice", "ends with", "stop"))
    and "against its will" not in case.title
]


@pytest.mark.parametrize("title", MISTRALS)
def test_a_prompt_of_mistral_has_the_tokens_of_its_own_formatter(
    answers: Mapping[str, Any], title: str
) -> None:
    source = tokenizer_folder("mistral_nemo")
    configuration = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {name: configuration[name] for name in ("bos_token", "eos_token")}
    asked = CONVERSATIONS[title]

    prompt = ChatTemplate(configuration["chat_template"], special).render(
        asked.messages, asked.tools, {}
    )

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    assert tokenizer.encode(prompt, add_special_tokens=False).ids == answers[f"mistral {title}"]


@pytest.mark.parametrize("case", HARMONIES, ids=lambda case: case.title)
def test_a_completion_of_gpt_oss_is_read_as_by_its_own_formatter(
    answers: Mapping[str, Any], case: Case
) -> None:
    messages = answers[case.title]
    [reasoning] = [each for each in REASONING_FORMATS if each.is_harmony]
    tools = {tool["function"]["name"]: () for tool in case.body.get("tools", ())}
    parser = OutputParser(None, reasoning, "<|start|>assistant", tools)

    deltas = [parser.push(case.says), parser.finish()]

    calls: list[ToolCallDelta] = [call for delta in deltas for call in delta.tool_calls]
    own = [(to, text) for _, to, text in messages if to is not None]
    assert [f"functions.{call.name}" for call in calls] == [to for to, _ in own]
    assert [json.loads(call.arguments) for call in calls] == [json.loads(text) for _, text in own]
    said = "".join(text for channel, to, text in messages if to is None and channel != "analysis")
    assert "".join(delta.content for delta in deltas) == said
    thought = "".join(text for channel, _, text in messages if channel == "analysis")
    assert "".join(delta.reasoning for delta in deltas) == thought
