"""A chat's output is read in the model's formats: marks that are special tokens are seen, others
never, and a resumed job has the same message."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from contract.events import ChoiceDelta, LogEntry, Tokens
from contract.function_types import Claimed
from contract.jobs import Endpoint, FinishReason, Job
from contract.model_cards import TokenizerFiles
from contract.output_formats import ReasoningFormat, ToolFormat
from tests.fakes import EOS_ID, PAD_ID, encode_text, hash_tokenizer
from tests.resume.logged_job import new_job
from workers.ipc.messages import TokenOut
from workers.output.formats import REASONING_FORMATS, TOOL_FORMATS
from workers.output.message import ResponseDelta
from workers.supervisor.held_job import HeldJob, OutputFormats

TOOLS: dict[str, tuple[str, ...]] = {"find": ("text",)}
THINK = ReasoningFormat(name="think", open="<think>\n", close="\n</think>\n\n")
CALL = '<call>{"name": "find", "arguments": {"text": "é </call>"}}</call>'
TEXT = f"<think>\nIt is é.\n</think>\n\nI look.\n{CALL}"


def files_of(
    tool_format: ToolFormat | None, reasoning: ReasoningFormat | None, *special: str
) -> TokenizerFiles:
    """The hash tokenizer with more special tokens, from the id 259 on."""
    files = replace(hash_tokenizer(), tool_format=tool_format, reasoning=reasoning)
    raw = json.loads(files.tokenizer_json)
    for number, content in enumerate(special):
        token = {**raw["added_tokens"][0], "id": PAD_ID + 1 + number, "content": content}
        raw["added_tokens"].append(token)
        raw["model"]["vocab"][content] = token["id"]
    return replace(files, tokenizer_json=json.dumps(raw))


@dataclass
class Chat:
    """A chat whose model says given tokens."""

    files: TokenizerFiles
    endpoint: Endpoint = Endpoint.CHAT
    has_tools: bool = True
    prompt: str = "user: x\nassistant: "
    params: Mapping[str, Any] = field(default_factory=dict)

    def hold(self) -> HeldJob:
        tokenizer = Tokenizer.from_str(self.files.tokenizer_json)
        job: Job = replace(
            new_job(
                "job-1", tuple(tokenizer.encode(self.prompt).ids), max_tokens=10_000, **self.params
            ),
            endpoint=self.endpoint,
            tools=TOOLS if self.has_tools else {},
        )
        claimed = Claimed(job, 1, 1, 1, "", 0, 60.0, False)
        return HeldJob(claimed, tokenizer, OutputFormats(self.files, tokenizer))

    def say(self, token_ids: Sequence[int], per_event: int = 1) -> list[LogEntry]:
        return says(self.hold(), token_ids, per_event)


def says(held: HeldJob, token_ids: Sequence[int], per_event: int) -> list[LogEntry]:
    """The events of the rest of an output, which an end token ends."""
    log: list[LogEntry] = []
    start = held.num_output_tokens
    for position, token_id in enumerate([*token_ids, EOS_ID][start:], start):
        reason = FinishReason.STOP if token_id == EOS_ID else None
        is_stopped = held.take(TokenOut("job-1", 1, 0, position, token_id, reason))
        if (position + 1) % per_event == 0 or reason is not None or is_stopped:
            event, _ = held.take_event()
            assert event is not None
            log.append(LogEntry(len(log) + 1, "", event))
        if is_stopped:
            break
    return log


def deltas_of(log: Sequence[LogEntry]) -> list[ChoiceDelta]:
    return [
        delta for entry in log if isinstance(entry.event, Tokens) for delta in entry.event.deltas
    ]


def message_of(log: Sequence[LogEntry]) -> tuple[ResponseDelta, int, FinishReason | None]:
    """The message, the tokens of its reasoning and why it ended."""
    message = ResponseDelta()
    deltas = deltas_of(log)
    for delta in deltas:
        message.extend(ResponseDelta(delta.text, delta.reasoning, list(delta.tool_calls)))
    return message, sum(delta.num_reasoning for delta in deltas), deltas[-1].finish_reason


FILES = files_of(hash_tokenizer().tool_format, THINK)


def test_a_resume_keeps_every_boundary() -> None:
    """The job is cut behind each token: its message, its deltas and its counts stay the same."""
    token_ids = encode_text(TEXT)
    whole = Chat(FILES).say(token_ids)
    message, num_reasoning, reason = message_of(whole)
    assert (message.content, message.reasoning) == ("I look.", "It is é.")
    assert [call.arguments for call in message.tool_calls] == ['{"text": "é </call>"}']
    assert reason is FinishReason.TOOL_CALLS
    assert num_reasoning == len("<think>\nIt is é.\n</think>".encode())
    for cut in range(len(whole)):
        held = Chat(FILES).hold()
        held.replay(whole[:cut])
        assert deltas_of(says(held, token_ids, 1)) == deltas_of(whole)[cut:]


CODER = files_of(next(each for each in TOOL_FORMATS if each.name == "qwen3_coder"), THINK)
_CLOSE = "</function>\n</tool_call>"
_CALL = f"<function=find>\n<parameter=text>\nx\n</parameter>\n{_CLOSE}"


@pytest.mark.parametrize(
    "text",
    [
        f"<think>so <tool_call>\n{_CALL}",
        f"<think>so <tool_call>\n{_CALL}\n</think>\n\n",
        f"<think>so</think>{_CALL}",
        f"<think>so</think><tool_call>\n<function=find>\n<parameter=text>\nx\n{_CLOSE}",
    ],
)
def test_slips_are_read_alike_after_any_interruption(text: str) -> None:
    token_ids = encode_text(text)
    whole = Chat(CODER).say(token_ids)
    message, _, reason = message_of(whole)
    assert (message.reasoning, message.content) == ("so", "")
    assert [call.arguments for call in message.tool_calls] == ['{"text": "x"}']
    assert reason is FinishReason.TOOL_CALLS
    for cut in range(len(whole)):
        held = Chat(CODER).hold()
        held.replay(whole[:cut])
        assert deltas_of(says(held, token_ids, 1)) == deltas_of(whole)[cut:]


@pytest.mark.parametrize("per_event", [2, 7, 1000])
def test_events_may_have_many_tokens(per_event: int) -> None:
    """Only how many deltas there are differs."""
    token_ids = encode_text(TEXT)
    assert message_of(Chat(FILES).say(token_ids, per_event)) == message_of(
        Chat(FILES).say(token_ids)
    )


SO = "<think>so</think>Yes"
BEGUN = "user: x\nassistant: <think>\n"


@pytest.mark.parametrize(
    ("chat", "text", "reasoning", "content", "num_reasoning"),
    [
        *(
            (Chat(FILES, endpoint, has_tools), SO, "so", "Yes", 17)
            for endpoint in (Endpoint.CHAT, Endpoint.RESPONSES)
            for has_tools in (True, False)
        ),
        (Chat(FILES, prompt=BEGUN), "so\n</think>\n\nYes", "so", "Yes", 11),
        (Chat(FILES), "<think>\nso on", "so on", "", 13),
        (Chat(FILES, has_tools=False), CALL, "", CALL, 0),
        # Callers of /v1/completions get what the model writes.
        (Chat(FILES, Endpoint.COMPLETIONS), TEXT, "", TEXT, 0),
    ],
)
def test_reasoning_is_apart(
    chat: Chat, text: str, reasoning: str, content: str, num_reasoning: int
) -> None:
    """With and without tools, begun by the prompt, or cut."""
    message, num_found, reason = message_of(chat.say(encode_text(text)))
    assert (message.reasoning, message.content, num_found) == (reasoning, content, num_reasoning)
    assert (message.tool_calls, reason) == ([], FinishReason.STOP)


def test_gemma_s_quotes_are_seen() -> None:
    """They are special tokens, and in no literal of the format."""
    gemma = next(each for each in TOOL_FORMATS if each.name == "gemma4")
    files = files_of(gemma, None, "<|tool_call>", '<|"|>', "<tool_call|>")
    opening, quote, close = range(PAD_ID + 1, PAD_ID + 4)
    said = [opening, *b"call:find{text:", quote, *b"a, b", quote, *b"}", close]
    message, _, _ = message_of(Chat(files).say(said))
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("find", '{"text": "a, b"}')]


def test_special_tokens_that_are_marks_are_seen_and_others_never() -> None:
    """Mistral's marks are special tokens, as are end tokens."""
    tools = ToolFormat(syntax="json", open="[CALLS]", middle="[ARGS]")
    reasoning = ReasoningFormat(name="r", open="[THINK]", close="[/THINK]")
    marks = ("[CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[IMG]")
    files = files_of(tools, reasoning, *marks)
    ids = dict(zip(marks, range(PAD_ID + 1, PAD_ID + 6), strict=True))
    said = [
        *(ids["[THINK]"], *b"so", PAD_ID, ids["[IMG]"], ids["[/THINK]"], *b"A", ids["[IMG]"]),
        *(PAD_ID, *b"B", ids["[CALLS]"], *b"find", ids["[ARGS]"], *b'{"text": "x"}'),
    ]
    message, num_reasoning, _ = message_of(Chat(files).say(said))
    assert (message.reasoning, message.content, num_reasoning) == ("so", "AB", 6)
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("find", '{"text": "x"}')]
    message, _, _ = message_of(Chat(files, has_tools=False).say(said))
    assert message.content == 'ABfind{"text": "x"}'
    message, _, _ = message_of(Chat(files, Endpoint.COMPLETIONS).say(said))
    assert message.content == 'soABfind{"text": "x"}'


HARMONY = next(each for each in REASONING_FORMATS if each.is_harmony)
STOPPED = {  # format, what the prompt ends with, the reasoning with its marks
    "begun by the prompt": (THINK, "<think>\n", "THOUGHT\n</think>\n\n"),
    "begun by the model": (THINK, "", "<think>\nTHOUGHT\n</think>\n\n"),
    "a call within": (THINK, "<think>\n", f"THOUGHT Or {CALL}?\n</think>\n\n"),
    "ended by the prompt": (THINK, "<think>\n\n</think>\n\n", ""),
    "none": (THINK, "", ""),
    "a model without": (None, "", ""),
    "harmony": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}


def stopped(
    kind: str, answer: str, **params: Any
) -> tuple[ResponseDelta, FinishReason | None, list[LogEntry]]:
    """What a chat says whose reasoning has all stop strings; the same after any interruption."""
    reasoning, prompt, thought = STOPPED[kind]
    files = files_of(hash_tokenizer().tool_format, reasoning)
    token_ids = encode_text(thought.replace("THOUGHT", "Q: a\n\nb") + answer)
    chat = Chat(files, prompt=f"user: x\n{prompt}", params=params)
    whole = chat.say(token_ids)
    for cut in range(len(whole)):
        held = chat.hold()
        held.replay(whole[:cut])
        assert deltas_of(says(held, token_ids, 1)) == deltas_of(whole)[cut:]
    message, _, reason = message_of(whole)
    has_thought = message.reasoning.startswith("Q: a\n\nb")
    assert has_thought == ("THOUGHT" in thought)
    return message, reason, whole


@pytest.mark.parametrize("kind", STOPPED)
def test_stop_strings_end_the_answer_and_not_the_reasoning(kind: str) -> None:
    """Nor are the line ends between both one of them. Those before `min_tokens` count for
    nothing."""
    for stop, content in [("Q:", "A\n\n"), ("\n\n", "A"), ("\n\nQ", "A"), ("QQ", "A\n\nQ: b")]:
        message, reason, _ = stopped(kind, "A\n\nQ: b", stop=(stop, "QQQ"))
        assert (message.content, reason) == (content, FinishReason.STOP)
    thought = STOPPED[kind][2].replace("THOUGHT", "Q: a\n\nb")
    least = len(encode_text(thought)) + 4
    message, _, _ = stopped(kind, "A\n\nQ: b\n\n", stop=("\n\n",), min_tokens=least)
    assert message.content == "A\n\nQ: b"


@pytest.mark.parametrize("kind", STOPPED)
def test_stop_tokens_end_the_answer_and_not_the_reasoning(kind: str) -> None:
    """The engine has them only where there is no reasoning to come."""
    [stop] = encode_text("Q")
    reasoning, prompt, _ = STOPPED[kind]
    is_ours = reasoning is not None and "</think>" not in prompt
    files = files_of(hash_tokenizer().tool_format, reasoning)
    params = {"stop_token_ids": (stop,)}
    held = Chat(files, prompt=f"user: x\n{prompt}", params=params).hold()
    assert held.start_message().params.stop_token_ids == (() if is_ours else (stop,))
    if is_ours:
        message, reason, whole = stopped(kind, "A\nQ: b", **params)
        assert (message.content, reason) == ("A\n", FinishReason.STOP)
        assert deltas_of(whole)[-1].token_ids == (stop,)


def test_a_stop_string_may_be_found_at_the_end_alone() -> None:
    """Where only the end shows that the output has no reasoning, or that its calls are some."""
    message, reason, _ = stopped("none", "<th", stop=("<t",))
    assert (message.content, reason) == ("", FinishReason.STOP)
    call = f"Q: a\n\nb{CALL}Q: more"
    chat = Chat(FILES, prompt="user: x\n<think>\n", params={"stop": ("Q:",)})
    message, _, reason = message_of(chat.say(encode_text(call)))
    assert (message.reasoning, message.content) == ("Q: a\n\nb", "")
    assert ([each.name for each in message.tool_calls], reason) == (
        ["find"],
        FinishReason.TOOL_CALLS,
    )
