"""A model's tokenizer files, for those who turn text into tokens and back."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from contract.jobs import TokenizerFiles
from workers.engine.model import ModelRefused
from workers.model.checkpoint import DEFAULT_REVISION, first_line


def read_tokenizer(model_path: str, revision: str = DEFAULT_REVISION) -> TokenizerFiles:
    """The fast tokenizer and chat template beside the weights. Raises ModelRefused."""
    if "auto_map" in get_tokenizer_config(model_path, revision=revision):
        raise ModelRefused(
            f"the tokenizer of {model_path} brings its own code (auto_map in "
            "tokenizer_config.json); batchway never runs code that comes with a model"
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_path, revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as exc:
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
    return TokenizerFiles(
        tokenizer_json=backend.to_str(),
        chat_template=_chat_template(tokenizer, model_path),
        special_tokens=special,
    )


def _chat_template(tokenizer: Any, model_path: str) -> str | None:
    """The default template: from the tokenizer's configuration or a chat_template.jinja."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        file = Path(model_path).expanduser() / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else None
    assert template is None or isinstance(template, str)
    return template
