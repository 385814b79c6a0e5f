"""Reads a model's tokenizer files."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from contract.codec import encode_tokenizer
from contract.model_cards import TokenizerFiles
from workers.engine.model import ModelRefused
from workers.model.checkpoint import DEFAULT_REVISION, first_line
from workers.model.tool_calls import read_tool_format
from workers.model.transformers_compat import get_tokenizer_config

_MAX_TEMPLATE_CHARS = 2**20


def read_tokenizer(model_path: str, revision: str = DEFAULT_REVISION) -> TokenizerFiles:
    """The fast tokenizer and chat template beside the weights. Raises ModelRefused."""
    try:
        configuration = get_tokenizer_config(model_path, revision=revision)
    except Exception as exc:  # transformers assumes a well-formed file
        raise ModelRefused(
            f"tokenizer_config.json of {model_path} cannot be read: {first_line(exc)}"
        ) from exc
    if "auto_map" in configuration:
        raise ModelRefused(
            f"the tokenizer of {model_path} brings its own code (auto_map in "
            "tokenizer_config.json); batchway never runs code that comes with a model"
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_path, revision=revision, trust_remote_code=False
        )
    except Exception as exc:  # transformers assumes well-formed files
        raise ModelRefused(
            f"{model_path} has no tokenizer that can be loaded: {first_line(exc)}"
        ) from exc
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.get_vocab_size() == 0:
        raise ModelRefused(f"{model_path} has no tokenizer.json, nor files to make one from")
    special = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if name.endswith("_token")
    }
    tokenizer.chat_template = _chat_template(tokenizer, model_path)
    response_template, tool_format = read_tool_format(tokenizer)
    files = TokenizerFiles(
        tokenizer_json=backend.to_str(),
        chat_template=tokenizer.chat_template,
        special_tokens=special,
        response_template=response_template,
        tool_format=tool_format,
    )
    try:
        encode_tokenizer(files)
    except ValueError as exc:
        raise ModelRefused(f"{model_path}: {exc}") from exc
    return files


def _chat_template(tokenizer: Any, model_path: str) -> str | None:
    """The default template: from the tokenizer's configuration or a chat_template.jinja.

    Raises ModelRefused.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        file = Path(model_path).expanduser() / "chat_template.jinja"
        try:
            template = file.read_text(encoding="utf-8") if file.is_file() else None
        except (OSError, UnicodeDecodeError) as exc:
            raise ModelRefused(f"chat_template.jinja of {model_path} cannot be read") from exc
    if template is None:
        return None
    if not isinstance(template, str):
        raise ModelRefused(f"the chat template of {model_path} is no text")
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ModelRefused(
            f"the chat template of {model_path} has {len(template)} characters, over "
            f"{_MAX_TEMPLATE_CHARS}"
        )
    return template
