"""Reads a model's tokenizer files, or explains why it cannot: the errors of transformers often name
the wrong package."""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from msgspec.structs import replace
from transformers import AutoTokenizer

from contract.codec import encode_tokenizer
from contract.model_cards import TokenizerFiles
from workers.engine.interface import ModelRefused
from workers.model.checkpoint import DEFAULT_REVISION, first_line
from workers.model.files import ModelFiles
from workers.model.folder_check import (
    TOKENIZER_FILES,
    refuse_own_code,
    template_variables,
)
from workers.model.output_formats import ShownChats, find_calls, find_reasoning, why_unknown

log = logging.getLogger("batchway.engine")

_MAX_VARIABLES = 256


def read_tokenizer(
    model_path: str,
    revision: str = DEFAULT_REVISION,
    *,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    template_kwargs: Mapping[str, Any] | None = None,
) -> TokenizerFiles:
    """Reads the fast tokenizer and chat template beside the weights, and how the model writes
    reasoning and tool calls. Raises ModelRefused."""
    tokenizer = _load(model_path, revision)
    special = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if name.endswith("_token")
    }
    template, tool_template = _templates(tokenizer)
    files = TokenizerFiles(
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
        chat_template=template,
        tool_template=tool_template,
        special_tokens=special,
        template_variables=_variables(template, tool_template, special, model_path),
        template_kwargs=dict(template_kwargs or {}),
    )
    files = _with_formats(files, tool_call_parser, reasoning_parser)
    try:
        encode_tokenizer(files)
    except ValueError as exc:
        raise ModelRefused(f"{model_path}: {exc}") from exc
    return files


def _load(model_path: str, revision: str) -> Any:
    refuse_own_code(ModelFiles(model_path, revision), "tokenizer_config.json")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_path, revision=revision, trust_remote_code=False
        )
    except Exception as exc:  # transformers assumes well-formed files
        raise ModelRefused(tokenizer_refusal(model_path, exc)) from exc
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.get_vocab_size() == 0:
        raise ModelRefused(f"{model_path} has no tokenizer.json, nor files to make one from")
    return tokenizer


def _templates(tokenizer: Any) -> tuple[str | None, str | None]:
    """Returns the default template, and the one for chats with tools if it is another."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {"default": templates}
    default, tool_use = templates.get("default"), templates.get("tool_use")
    if default is None:
        return tool_use, None
    return default, None if tool_use == default else tool_use


def _variables(
    template: str | None, tool_template: str | None, special: Mapping[str, str], model_path: str
) -> tuple[str, ...]:
    """The variables that templates read beyond those of every chat. Raises ModelRefused."""
    found: set[str] = set()
    for source in (template, tool_template):
        found |= template_variables(f"the chat template of {model_path}", source)
    return tuple(sorted(found - set(special))[:_MAX_VARIABLES])


def _with_formats(files: TokenizerFiles, calls: str, reasoning: str) -> TokenizerFiles:
    """Adds the formats that the templates show, or that were asked for. Raises ModelRefused."""
    if files.chat_template is None:
        return files
    variables = {**files.special_tokens, **files.template_kwargs}
    # An operator's variable may switch reasoning off, but a call may switch it on again.
    by_default = ShownChats(files.chat_template, files.special_tokens)
    found = find_reasoning(by_default, reasoning)
    found = found or find_reasoning(ShownChats(files.chat_template, variables), reasoning)
    chats = ShownChats(files.tool_template or files.chat_template, variables)
    called = find_calls(chats, found, calls)
    if called is None:
        log.info("tools are off: %s", why_unknown(chats))
        return replace(files, reasoning=found)
    return replace(
        files,
        reasoning=found,
        tool_format=called.format,
        string_arguments=called.string_arguments,
        null_content=called.null_content,
    )


# Packages that read a tokenizer.model, by module.
_FOR_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}


def tokenizer_refusal(model_path: str, exc: Exception) -> str:
    """One sentence for what `AutoTokenizer` has raised."""
    said = str(exc)
    if "Couldn't instantiate the backend tokenizer" in said:
        return f"{model_path} has no tokenizer: none of {TOKENIZER_FILES}"
    if "tiktoken" in said:
        if missing := [name for module, name in _FOR_SENTENCEPIECE.items() if not _has(module)]:
            return _needs(model_path, "SentencePiece model", *missing)
        if not _has("tiktoken"):
            return _needs(model_path, "vocabulary, which is no SentencePiece model,", "tiktoken")
    if "mistral-common" in said or "mistral_common" in said:
        return _needs(model_path, "tekken.json", "mistral-common")
    if isinstance(exc, ImportError):
        return (
            f"{model_path} has no tokenizer.json, and its own tokenizer is a program that gateways "
            f"cannot run ({first_line(exc)})"
        )
    return f"{model_path} has no tokenizer that can be loaded: {first_line(exc)}"


def _needs(model_path: str, what: str, *packages: str) -> str:
    named = " ".join(packages)
    return (
        f"to read the {what} of {model_path}, the worker needs {' and '.join(packages)}: "
        f"pip install {named}"
    )


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
