"""The model families whose real tokenizer a package has, and how each of them writes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Call = tuple[str, Mapping[str, Any]]  # a function's name and the arguments


@dataclass(frozen=True)
class Family:
    """`write` gives the text of an answer as the model writes it: content, then calls. `think`
    gives what it writes in all where it reasons first: from a thought and such a text."""

    name: str
    tokenizer: str
    config: dict[str, Any]
    template: str = ""  # one of llama.cpp's; "": the tokenizer's own
    generation: dict[str, Any] = field(default_factory=dict)
    write: Callable[[str, Sequence[Call]], str] = lambda content, calls: content
    calls_tools: bool = True
    can_repeat: bool = True  # writes several calls in one answer
    shows_repeats: bool = True  # and its template shows them, so that strict calls may be several
    content_precedes_calls: bool = True
    think: Callable[[str, str], str] | None = None
    thinking: dict[str, Any] = field(default_factory=dict)  # chat_template_kwargs that switch it on
    not_thinking: dict[str, Any] | None = None  # and off; None: it cannot be
    efforts: tuple[str, ...] = ()  # of reasoning_effort
    added_tokens: tuple[str, ...] = ()  # that the tokenizer of the package lacks
    lookalikes: tuple[str, ...] = ()  # texts spelled like its added tokens
    endings: tuple[str, ...] = ()  # each ends an answer
    prose: tuple[str, ...] = ()  # that mentions the marks of calls
    mistakes: tuple[str, ...] = ()  # that models make in calls; a chat must go on after them


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(content: str, calls: Sequence[Call]) -> str:
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    ]
    return "\n".join(filter(None, [content, *written]))


def _llama(content: str, calls: Sequence[Call]) -> str:
    written = [
        f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls
    ]
    return content + "; ".join(written)


def _mistral(content: str, calls: Sequence[Call]) -> str:
    written = [
        {"name": name, "arguments": arguments, "id": f"callno{number:03}"}
        for number, (name, arguments) in enumerate(calls)
    ]
    return content + (f"[TOOL_CALLS]{_json(written)}" if calls else "")


def _deepseek(content: str, calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    section = "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"
    return content + (section if calls else "")


def _deepseek31(content: str, calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    section = "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"
    return content + (section if calls else "")


def _harmony(content: str, calls: Sequence[Call]) -> str:
    if not calls:
        return f"<|channel|>final<|message|>{content}"
    preamble = f"<|channel|>commentary<|message|>{content}<|end|><|start|>assistant"
    [(name, arguments)] = calls
    call = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return (preamble if content else "") + f"{call}{_json(arguments)}<|call|>"


def _config(model_type: str, vocab_size: int, eos: int | list[int], **more: Any) -> dict[str, Any]:
    """A config.json of a small model of this family."""
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "eos_token_id": eos,
        **more,
    }


QWEN3 = Family(
    name="qwen3",
    tokenizer="qwen3",
    config=_config("qwen3", 151936, 151645),
    generation={
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [151645, 151643],
    },
    write=_hermes,
    think=lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}",
    not_thinking={"enable_thinking": False},
    lookalikes=("<tool_call>", "<think>", "a</think>b", "<|im_end|>", "<|endoftext|>"),
    endings=("<|im_end|>", "<|endoftext|>"),
    prose=(
        "The tag <tool_call> opens a call.",
        "Between <tool_call> and </tool_call> stands a call.",
        'Write {"name": "find", "arguments": {}} there.',
    ),
    mistakes=(
        '<tool_call>\n{"name": "find", "arguments": null}\n</tool_call>',
        '<tool_call>\n{"name": "find", "arguments": ""}\n</tool_call>',
        '<tool_call>\n{"name": "find", "arguments": ["a"]}\n</tool_call>',
        '<tool_call>\n{"name": "find", "arguments": {"text": "l1\nl2"}}\n</tool_call>',
        '<tool_call>\n{"name": "find"}\n</tool_call>',
        '<tool_call>\n{"name": "find", "arguments": {"text": "a"}\n</tool_call>',
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
    ),
)
LLAMA3 = Family(
    name="llama3.1",
    tokenizer="llama3_1",
    config=_config("llama", 128256, [128001, 128008, 128009]),
    template="meta-llama-Llama-3.1-8B-Instruct",
    generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    write=_llama,
    shows_repeats=False,
    content_precedes_calls=False,
    lookalikes=("<|eot_id|>", "<|begin_of_text|>", "x<|start_header_id|>y"),
    endings=("<|eot_id|>", "<|end_of_text|>"),
    prose=(
        'Write {"name": "find", "parameters": {}} to call it.',
        '{"name": "Paris", "size": 3}',
        '{"name": "unknown", "parameters": {}}',
    ),
    mistakes=(
        '{"name": "find", "parameters": null}',
        '{"name": "find", "parameters": {"text": "l1\nl2"}}',
        '{"name":"find","parameters":{"text":"1"}}\n{"name":"now","parameters":{}}',
        '{"name": "find", "parameters": {"text": "1"}}\nI have called it.',
        '{"name": "find", "arguments": {"text": "1"}}',
    ),
)
GEMMA3 = Family(
    name="gemma3",
    tokenizer="gemma3",
    config=_config("gemma3_text", 262208, 1, head_dim=16),
    generation={"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106]},
    calls_tools=False,
    lookalikes=("<h1>", "</h1>", "<table>x</table>", "<end_of_turn>", "<eos>", "<unused0>"),
    endings=("<end_of_turn>", "<eos>"),
)
DEEPSEEK3 = Family(
    name="deepseek-v3",
    tokenizer="deepseek_v3",
    config=_config("llama", 129280, 1),
    write=_deepseek,
    lookalikes=("<｜tool▁sep｜>", "<｜end▁of▁sentence｜>", "<|EOT|>"),
    endings=("<｜end▁of▁sentence｜>",),
    prose=("The mark <｜tool▁calls▁begin｜> opens calls.",),
    mistakes=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
        '{"text": "l1\nl2"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK31 = Family(
    name="deepseek-v3.1",
    tokenizer="deepseek_v3",
    config=_config("llama", 129280, 1),
    template="deepseek-ai-DeepSeek-V3.1",
    generation={"temperature": 0.6, "top_p": 0.95},
    write=_deepseek31,
    think=lambda thought, text: f"{thought}</think>{text}",
    added_tokens=("<think>", "</think>"),  # as in V3.1's own tokenizer, which no package has
    thinking={"thinking": True},
    not_thinking={"thinking": False},
    lookalikes=("<｜tool▁sep｜>", "<think>", "</think>"),
    endings=("<｜end▁of▁sentence｜>",),
    prose=("The mark <｜tool▁calls▁begin｜> opens calls.",),
    mistakes=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>null<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜><｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
)
GPT_OSS = Family(
    name="gpt-oss",
    tokenizer="gptoss",
    config=_config("gpt_oss", 201088, 200002, head_dim=16),
    template="openai-gpt-oss-120b",
    generation={"do_sample": True, "eos_token_id": [200002, 199999, 200012]},
    write=_harmony,
    can_repeat=False,
    think=lambda thought, text: (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{text}"
    ),
    efforts=("low", "medium", "high"),
    lookalikes=("<|endoftext|>", "<|startoftext|>"),
    endings=("<|return|>", "<|endoftext|>"),
    mistakes=(
        '<|channel|>commentary to=functions.find <|constrain|>json<|message|>["a"]<|call|>',
        "<|channel|>commentary to=functions.find<|message|><|call|>",
        '<|channel|>analysis to=functions.find<|message|>{"text": "a"}<|call|>',
        "<|channel|>final<|message|>Hello.<|end|>",
    ),
)
MISTRAL = Family(
    name="mistral-nemo",
    tokenizer="mistral_nemo",
    config=_config("mistral", 131072, 2, head_dim=16),
    write=_mistral,
    lookalikes=("[TOOL_CALLS]", "[INST]", "</s>", "<SPECIAL_20>"),
    endings=("</s>",),
    prose=("The mark [TOOL_CALLS] opens calls.", "[1, 2] is a list."),
    mistakes=(
        '[TOOL_CALLS][{"name": "find", "arguments": null}]',
        '[TOOL_CALLS][{"name": "find", "arguments": {"text": "l1\nl2"}, "id": "x"}]',
        '[TOOL_CALLS] [{"name":"find","arguments":{"text":"1"}}]',
        '[TOOL_CALLS]{"name": "find", "arguments": {"text": "1"}}',
    ),
)
FAMILIES = (QWEN3, LLAMA3, GEMMA3, DEEPSEEK3, DEEPSEEK31, GPT_OSS, MISTRAL)
