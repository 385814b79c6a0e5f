"""The demo model's tokenizer: one token for each byte, and eight special ones.

Without merges every text has exactly one encoding, every encoding of a text decodes to it, and a
digit is a token of its own. A byte's token id is the byte.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

MAX_CONTEXT = 2048
SPECIAL_TOKENS = (
    "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "<|tool|>",
    "<|call|>",
)  # fmt: skip
BOS_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, END_ID, PAD_ID, TOOL_ID, CALL_ID = range(256, 264)
VOCAB_SIZE = 264

CHAT_TEMPLATE = """\
{{- '<|bos|>' -}}
{%- if tools -%}
    {{- '<|system|>tools: ' -}}
    {%- for tool in tools -%}
        {%- set names = tool.function.get('parameters', {}).get('properties', {}) | join(', ') -%}
        {{- tool.function.name + '(' + names + ')' + ('' if loop.last else '; ') -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] not in ('system', 'user', 'assistant', 'tool') -%}
        {{- raise_exception('the roles are system, user, assistant and tool') -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] or [] -%}{{- part['text'] -}}{%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '<|call|>{"name": ' + call.function.name | tojson -}}
        {{- ', "arguments": ' + call.function.arguments | tojson + '}' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def byte_names() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in names]
    return names | {byte: chr(256 + i) for i, byte in enumerate(others)}


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges that puts <|bos|> in front of bare text."""
    vocab = {name: byte for byte, name in byte_names().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A",
        pair="<|bos|> $A $B",
        special_tokens=[("<|bos|>", BOS_ID)],
    )
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": MAX_CONTEXT,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
