"""Text to token ids: a model's tokenizer and chat template, as they came from Redis.

The template runs in a sandbox, comes only from the model, and its output is bounded.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from contract.jobs import TokenizerFiles
from gateway.text_stream import TextStream

MAX_RENDERED_CHARS = 4 * 1024 * 1024
_REFUSAL_CHARS = 200
MAX_POWER = 1_000


class TemplateRefused(Exception):
    """The chat template did not take these messages; the message is for the caller only."""


class ModelTokenizer:
    """One model's tokenizer. Safe to use from several threads; CPU work throughout.

    Raises ValueError where the files are none that `tokenizers` or jinja2 can read.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as exc:  # tokenizers raises bare Exceptions
            raise ValueError("unreadable tokenizer") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = dict(files.special_tokens)
        self._template: jinja2.Template | None = None
        if files.chat_template is not None:
            self._template = _environment().from_string(files.chat_template)
        # Templates older than the role know it as `system`.
        self._knows_developer = "developer" in (files.chat_template or "")
        self._bytes_of_char = _byte_level(files.tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of messages, up to where the assistant's answer starts.

        Raises TemplateRefused.
        """
        # The template writes the special tokens itself.
        return self._encode(self._render(messages), add_special_tokens=False)

    def encode_text(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True)

    def text_stream(self, context_ids: Sequence[int] = (), offset: int = 0) -> TextStream:
        """Ids to text, a token at a time."""
        return TextStream(self._tokenizer, context_ids, offset)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, also where they are part of a character."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of_char:
            return b"".join(self._bytes_of_char.get(char, char.encode()) for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])  # byte fallback
        return token.replace("\u2581", " ").encode()

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        assert self._template is not None, "ask has_chat_template first"
        if not self._knows_developer:
            messages = [_as_system(message) for message in messages]
        context = self._special_tokens | {"tools": None, "documents": None}
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                messages=messages, add_generation_prompt=True, **context
            ):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise TemplateRefused("the chat template's output is too long")
                parts.append(part)
        except jinja2.TemplateError as exc:
            reason = (exc.message or "it failed")[:_REFUSAL_CHARS]
            raise TemplateRefused(f"the model's chat template refused: {reason}") from exc
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as exc:
            raise TemplateRefused("the model's chat template failed on these messages") from exc
        return "".join(parts)


def _as_system(message: Mapping[str, str]) -> Mapping[str, str]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's, which bounds ranges, with bounds on the two signs that fill a memory at once."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and max(abs(left), abs(right)) > MAX_POWER:
            raise SecurityError(f"powers are of numbers up to {MAX_POWER}")
        if (
            operator == "*"
            and max(_repeated(left, right), _repeated(right, left)) > MAX_RENDERED_CHARS
        ):
            raise SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _repeated(items: Any, times: Any) -> int:
    """The length of a text or a list that is repeated; 0 where nothing is."""
    is_repetition = isinstance(items, str | bytes | list | tuple) and isinstance(times, int)
    return len(items) * times if is_repetition else 0


def _environment() -> jinja2.Environment:
    """The environment that chat templates are written for (transformers' conventions)."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """jinja2's own would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _byte_level(tokenizer_json: str) -> dict[str, bytes]:
    """Bytes by their printable stand-ins (GPT-2's) where the tokenizer is byte-level, else {}."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
    if "ByteLevel" not in kinds:
        return {}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    stand_ins = {chr(byte): bytes([byte]) for byte in printable}
    return stand_ins | {chr(256 + rank): bytes([byte]) for rank, byte in enumerate(others)}
