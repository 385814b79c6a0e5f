"""What can be said of a checkpoint before any weight is read: refusals, lengths, end tokens.

Knows configuration files. Runs no code that comes with a model.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from workers.engine.model import ModelRefused
from workers.model.place import check_place

DEFAULT_REVISION = "main"
# Where families keep the number of positions they were trained for.
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def read_config(model_path: str, revision: str = DEFAULT_REVISION) -> PretrainedConfig:
    """The configuration of a decoder that we can serve. Raises ModelRefused."""
    check_place(model_path)
    raw = _read_raw_config(model_path, revision)
    if "auto_map" in raw:
        raise ModelRefused(
            f"{model_path} brings its own code (auto_map in config.json); "
            "batchway never runs code that comes with a model"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            model_path, revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelRefused(
            f"the configuration of {model_path} is none that this release of transformers "
            f"knows: {first_line(exc)}"
        ) from exc
    _check_kind(model_path, config)
    return config


def _read_raw_config(model_path: str, revision: str) -> dict[str, Any]:
    """config.json as it stands, before any class reads it."""
    try:
        raw, _ = PretrainedConfig.get_config_dict(model_path, revision=revision)
    except (OSError, ValueError) as exc:
        if Path(model_path).expanduser().is_dir():
            raise ModelRefused(f"config.json of {model_path} cannot be read as JSON") from exc
        raise ModelRefused(
            f"there is no folder {model_path}, and the Hugging Face Hub gives no such model or "
            f"revision (unknown, private, or out of reach): {first_line(exc)}"
        ) from exc
    assert isinstance(raw, dict)
    return raw


def _check_kind(model_path: str, config: PretrainedConfig) -> None:
    """Refuses what is no decoder."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise ModelRefused(f"{model_path} is an encoder-decoder; batchway serves decoders")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        raise ModelRefused(f"{model_path} attends to both sides; batchway serves causal decoders")


def context_length(config: PretrainedConfig) -> int | None:
    """Positions that the model was made for; None where its configuration sets no limit."""
    text = config.get_text_config()
    for name in _LENGTH_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def eos_token_ids(
    model_path: str, config: PretrainedConfig, revision: str = DEFAULT_REVISION
) -> tuple[int, ...]:
    """The tokens that end an answer, by the configuration and the generation configuration."""
    sources: list[Any] = [config.get_text_config().eos_token_id, config.eos_token_id]
    with suppress(OSError):  # the file is optional
        generation = GenerationConfig.from_pretrained(model_path, revision=revision)
        sources.append(generation.eos_token_id)
    found: set[int] = set()
    for value in sources:
        values = value if isinstance(value, list | tuple) else [value]
        found.update(v for v in values if v is not None)
    return tuple(sorted(found))


def first_line(exc: BaseException) -> str:
    """The first line of a library's message: what an operator can use of it."""
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__
