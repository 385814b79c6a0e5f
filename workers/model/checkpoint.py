"""Checks a checkpoint's configuration, as transformers reads it, before weights are read. Runs none
of its code. What needs no torch is in `folder_check`."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
)

from workers.engine.interface import ModelRefused
from workers.model.files import DEFAULT_REVISION as DEFAULT_REVISION
from workers.model.files import ModelFiles
from workers.model.folder_check import check_checkpoint, check_config, refuse_encoder_decoder
from workers.model.rope import scaled_length

# Minimum sizes, by transformers' names. Without attention there are no heads.
_LEAST_SIZES = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 0,
    "num_key_value_heads": 0,
    "head_dim": 0,
    "intermediate_size": 0,
}
# Larger decoders would take for ever to build or overflow torch's integers.
_MAX_LAYERS = 1_000
_MAX_COUNT = 2**16  # of heads, experts and other num_… fields
_MAX_SIZE = 2**31 - 1
# Configuration keys of the trained number of positions.
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def read_config(
    model_path: str, revision: str = DEFAULT_REVISION, *, pools: bool = False
) -> PretrainedConfig:
    """Returns the configuration of a model that we can serve: a decoder, or if `pools`, any that
    takes one text. Raises ModelRefused."""
    check_checkpoint(ModelFiles(model_path, revision))
    config = parse_config(model_path, revision)
    _check_kind(model_path, config, pools=pools)
    _check_sizes(model_path, config)
    return config


def parse_config(model_path: str, revision: str = DEFAULT_REVISION) -> PretrainedConfig:
    """The configuration of any model that transformers knows. Raises ModelRefused."""
    check_config(ModelFiles(model_path, revision))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            model_path, revision=revision, trust_remote_code=False
        )
    except Exception as exc:  # transformers assumes well-formed files
        raise ModelRefused(
            f"the configuration of {model_path} is none that this release of transformers "
            f"knows: {first_line(exc)}"
        ) from exc
    return config


def _check_sizes(model_path: str, config: PretrainedConfig) -> None:
    """Refuses sizes outside any real decoder's: building would fail oddly or never end."""
    least = _LEAST_SIZES | dict.fromkeys(_LENGTH_NAMES, 1)
    for layer in layer_configs(config.get_text_config()):
        sizes = {name: getattr(layer, name, None) for name in least} | layer.to_dict()
        for name, value in sizes.items():
            if name not in least and not name.startswith("num_"):
                continue
            most = _MAX_COUNT if name.startswith("num_") else _MAX_SIZE
            most = _MAX_LAYERS if name == "num_hidden_layers" else most
            for number in value if isinstance(value, list | tuple) else [value]:
                if isinstance(number, int) and not least.get(name, 0) <= number <= most:
                    raise ModelRefused(
                        f"config.json of {model_path} has {name} {number:.6g}; a decoder has "
                        f"{least.get(name, 0)} to {most}"
                    )
    if (length := context_length(config)) is not None and not 1 <= length <= _MAX_SIZE:
        raise ModelRefused(
            f"config.json of {model_path} has rotary scaling to {length} positions; a decoder has "
            f"1 to {_MAX_SIZE}"
        )


def layer_configs(text: Any) -> list[Any]:
    """The configuration of all layers, or where sizes differ by layer (Gemma 4), that of each: the
    whole one then raises for such a size (`per_layer_config` of transformers 5.24)."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def _check_kind(model_path: str, config: PretrainedConfig, *, pools: bool) -> None:
    """Refuses a model that neither generates nor pools."""
    refuse_encoder_decoder(model_path, config.is_encoder_decoder)
    if pools and not hasattr(config.get_text_config(), "vocab_size"):
        raise ModelRefused(f"{model_path} is a {architecture_of(config)}, which takes no text")
    if not pools:
        _check_generates(model_path, config)


def _check_generates(model_path: str, config: PretrainedConfig) -> None:
    """Refuses a model that is no decoder, or has no head for the next token."""
    text, name = config.get_text_config(), architecture_of(config)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise ModelRefused(
            f"{model_path} is an encoder ({name}): it attends to both sides and generates no text; "
            "for embeddings it lacks modules.json, which says how vectors are made "
            f"(sentence-transformers: SentenceTransformer({model_path!r}).save_pretrained(FOLDER))"
        )
    types = (type(config), type(text))
    if not any(each in MODEL_FOR_CAUSAL_LM_MAPPING for each in types) or not _has_text_head(name):
        is_generator = "For" in name and _has_text_head(name)
        fault = "is none of transformers' causal decoders" if is_generator else "generates no text"
        raise ModelRefused(
            f"{model_path} is a {name}, which {fault}; batchway serves causal decoders, and models "
            "for embeddings and classes"
        )
    sees_both_sides = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    if sees_both_sides or not getattr(text, "is_causal", True):
        raise ModelRefused(
            f"{model_path} attends to both sides, so it generates no text, and has no modules.json "
            "that says how it makes vectors; batchway serves causal decoders, and models for "
            "embeddings and classes"
        )


def architecture_of(config: PretrainedConfig) -> str:
    """The class that the checkpoint was saved from, or its family."""
    names = getattr(config, "architectures", None)
    return str(names[0]) if isinstance(names, list) and names else str(config.model_type)


def _has_text_head(architecture: str) -> bool:
    """Whether the head may be that of a decoder. False for known others, such as
    LlamaForTokenClassification. A model without a head may share it with its embedding."""
    _, is_for, task = architecture.partition("For")
    return not is_for or "LM" in task or "Generation" in task


def context_length(config: PretrainedConfig) -> int | None:
    """Maximum positions by the configuration, with its rotary scaling; None if unlimited."""
    text = layer_configs(config.get_text_config())[0]
    for name in _LENGTH_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return scaled_length(text, value)
    return None


def first_line(exc: BaseException) -> str:
    """The first line of a library's message, plus the next if the sentence continues."""
    lines = [line.strip() for line in str(exc).strip().splitlines()]
    if not lines:
        return type(exc).__name__
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"KeyError: {line}" if isinstance(exc, KeyError) else line  # it says the key alone
