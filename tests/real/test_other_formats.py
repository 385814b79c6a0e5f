"""Each of llama.cpp's templates with a made-up tokenizer: a model that says what the template shows
of an answer is understood, wherever its job is cut."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.jobs import Endpoint, FinishReason, Job
from gateway.child import Refused
from gateway.models.chat_template import ChatTemplate
from tests.fakes import INLINE
from tests.real.conversations import HARD, WEATHER, answer, call, user
from tests.real.made_up import MARK, Marks, write_made_up_folder
from tests.real.model_folder import say
from tests.real.parts import needs_parts
from tests.real.scripted import ScriptedModel, Vocabulary
from tests.real.test_templates import FORMATS
from tests.resume.interruptions import Workers
from tests.resume.local_worker import tokenizer_of
from tests.resume.logged_job import LoggedJob, new_job
from workers.engine.grammar import Grammars
from workers.engine.interface import LoadedModel
from workers.ipc.messages import EngineOptions
from workers.model.tokenizer import read_tokenizer

pytestmark = [pytest.mark.campaign, needs_parts]

KNOWN = [name for name, (calls, _, _) in FORMATS.items() if calls is not None]
REASONING = [
    name
    for name, (_, reasoning, why) in FORMATS.items()
    if reasoning is not None and "fails" not in why
]
QUESTION, CONTENT = "What is it?", "I say this."
THOUGHT = "I think of this.\n\nAnd of that."
CALLS = [("get_weather", HARD), ("get_weather", {"city": "Oslo"})]
_NUM_CUTS = 2


@dataclass(frozen=True)
class Said:
    """What a model says, and what it means."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


class MadeUpModel:
    """A template with a made-up tokenizer, and a model that says what the template shows."""

    def __init__(self, name: str, folder: Path, marks: Marks, *, thinks: bool = False) -> None:
        self._folder = folder
        self._variables = dict.fromkeys(("enable_thinking", "thinking"), thinks)
        write_made_up_folder(name, folder, marks)
        self.files = read_tokenizer(str(folder), template_kwargs=self._variables)
        self._tokenizer = tokenizer_of(self.files)
        self._template = ChatTemplate(str(self.files.chat_template), self.files.special_tokens)

    def workers(self) -> Workers:
        [ending_id] = self._tokenizer.encode("</s>", add_special_tokens=False).ids
        size = self._tokenizer.get_vocab_size()
        vocabulary = Vocabulary(self._tokenizer, ending_id)
        model = ScriptedModel(self._folder, vocabulary, frozenset({ending_id}), 32_768)
        loaded = LoadedModel(
            model, model.max_model_len, size, (ending_id,), self.files, resume="exact"
        )
        grammars = Grammars(self.files.tokenizer_json, size, {ending_id}, *INLINE)
        options = EngineOptions(model_path="made-up", max_num_batched_tokens=8192)
        return Workers(loaded, options, grammars=grammars)

    def calls(self, calls: list[tuple[str, Any]], content: str = "") -> Said | None:
        """An answer with calls; None: the template has no such answer."""
        format_, reasoning = self.files.tool_format, self.files.reasoning
        assert format_ is not None
        if len(calls) > 1 and format_.between is None:
            return None
        written = [call(name, self._arguments(given), n) for n, (name, given) in enumerate(calls)]
        text = content or (None if self.files.null_content else "")
        opening = (format_.begin + format_.open).strip() or '{"name"'
        shown = self._shown(answer(text, tool_calls=written), content or opening)
        if shown is None or content not in shown.partition(calls[0][0])[0]:
            return None
        before, last, behind = shown.rpartition(calls[-1][0])
        if not last or self._cut(before) != before:
            return None  # content and calls are two answers
        behind = self._cut(behind)
        if (end := (format_.end or format_.close).strip()) and end in behind:
            behind = behind[: behind.rindex(end) + len(end)]
        shown = before + last + behind
        is_content = reasoning is None or not reasoning.is_harmony
        return Said(shown, *_either(content, is_content), calls)

    def thought(self) -> Said | None:
        """An answer behind reasoning; None: the template shows none."""
        shown = self._shown(answer(CONTENT, reasoning_content=THOUGHT), THOUGHT)
        if shown is None or THOUGHT not in shown:
            return None
        return Said(shown.removesuffix(self._turn_end).rstrip(), CONTENT, THOUGHT)

    def job(self, said: Said, **params: Any) -> Job:
        prompt = self._rendered([user(say(self._folder, said.text))])
        prompt_ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        job = new_job("job", prompt_ids, max_tokens=4000, **params)
        tools = {"get_weather": ("city", "units")}
        return msgspec.structs.replace(job, endpoint=Endpoint.CHAT, tools=tools)

    @cached_property
    def _turn_end(self) -> str:
        shown = self._rendered([user(QUESTION), answer(CONTENT)], is_answered=False)
        return shown.rpartition(CONTENT)[2]

    def _cut(self, text: str) -> str:
        """Up to a mark that stands behind answers, and in no call."""
        format_ = self.files.tool_format
        literals = "" if format_ is None else "".join(map(str, msgspec.structs.astuple(format_)))
        marks = [mark for mark in MARK.findall(self._turn_end) if mark not in literals]
        places = [text.find(mark) for mark in marks if mark in text]
        return text[: min(places)] if places else text.removesuffix(self._turn_end)

    def _shown(self, message: Mapping[str, Any], head: str) -> str | None:
        """What the template shows of an answer behind the prompt; None: it refuses it. Where it
        shows another prompt, from `head` on."""
        prompt = self._rendered([user(QUESTION)])
        try:
            text = self._rendered([user(QUESTION), message], is_answered=False)
        except Refused:
            return None
        if text.startswith(prompt):
            return text.removeprefix(prompt)
        shown = text.rpartition(QUESTION)[2]
        reasoning = self.files.reasoning
        is_open = reasoning is not None and reasoning.state_after(prompt) == "open"
        if head not in shown or (head == THOUGHT and not is_open):
            return None
        ends = reasoning.close.lstrip() if reasoning and is_open and head != THOUGHT else ""
        return ends + shown[shown.index(head) :]

    def _arguments(self, arguments: Any) -> Any:
        return json.dumps(arguments) if self.files.string_arguments else arguments

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, is_answered: bool = True) -> str:
        variables = self._variables
        return self._template.render(messages, [WEATHER], variables, is_answered=is_answered)


def of_half(names: Sequence[str]) -> pytest.MarkDecorator:
    """Every second one, in CI."""
    params = [pytest.param(n, marks=pytest.mark.long if i % 2 else ()) for i, n in enumerate(names)]
    return pytest.mark.parametrize("name", params)


@of_half(KNOWN)
def test_calls_that_a_template_shows_are_understood(name: str, tmp_path: Path) -> None:
    """Alone, several, and behind content, whatever the tokenizer makes of the marks."""
    for marks in Marks:
        model = MadeUpModel(name, tmp_path / marks, marks)
        said = [model.calls(CALLS[:1])]
        assert said[0] is not None
        if marks is Marks.SPECIAL:
            said += [model.calls(CALLS), model.calls(CALLS[:1], CONTENT)]
        check(model, [each for each in said if each is not None], name)


@of_half(REASONING)
def test_reasoning_that_a_template_shows_is_understood(name: str, tmp_path: Path) -> None:
    for marks in Marks:
        model = MadeUpModel(name, tmp_path / marks, marks, thinks=True)
        if (said := model.thought()) is not None:
            check(model, [said], name)


def _either(content: str, is_content: bool) -> tuple[str, str]:
    """Content and reasoning: gpt-oss's template shows the content before a call as reasoning."""
    return (content, "") if is_content else ("", content)


def check(model: MadeUpModel, said: Sequence[Said], seed: str) -> None:
    """Runs a job for each, then again from some of its cuts."""
    workers, chance = model.workers(), random.Random(seed)
    for each in said:
        whole, meant = workers.undisturbed(model.job(each)), replace(each, text="")
        assert read(whole) == meant
        cuts = [whole.cut(number) for number in chance.sample(range(len(whole.log)), _NUM_CUTS)]
        workers.run(*cuts)
        assert [cut.answer for cut in cuts] == [whole.answer] * len(cuts)
        assert [read(cut) for cut in cuts] == [meant] * len(cuts)


def read(job: LoggedJob) -> Said:
    """What the log says."""
    deltas = [delta for entry in job.log for delta in getattr(entry.event, "deltas", ())]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for part in (part for delta in deltas for part in delta.tool_calls):
        names[part.index] = names.get(part.index, "") + part.name
        arguments[part.index] = arguments.get(part.index, "") + part.arguments
    calls = [(name, json.loads(arguments[index])) for index, name in names.items()]
    assert job.answer.finish_reason[0] == (FinishReason.TOOL_CALLS if calls else FinishReason.STOP)
    content, reasoning = ("".join(getattr(d, f) for d in deltas) for f in ("text", "reasoning"))
    return Said("", content.lstrip(), reasoning, calls)
