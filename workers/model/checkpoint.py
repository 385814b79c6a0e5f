"""Checks a checkpoint's configuration files before weights are read. Runs none of its code."""

import json
from collections.abc import Mapping
from pathlib import Path
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
from workers.model.model_path import check_place
from workers.model.rope import of_each_layer, scaled_length

# Files that transformers reads as JSON, with their size limits. tokenizer.json has its own reader.
_JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", "model.safetensors.index.json"),
)
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
_INDEX = "model.safetensors.index.json"
# Methods of quantised checkpoints that vLLM reads on a GPU.
_VLLM_METHODS = (
    "awq",
    "gptq",
    "fp8",
    "compressed-tensors",
    "mxfp4",
    "modelopt",
    "quark",
    "torchao",
)
_ROTARY_NUMBERS = ("factor", "original_max_position_embeddings")
# Configuration keys of the trained number of positions.
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def read_config(
    model_path: str, revision: str = DEFAULT_REVISION, *, pools: bool = False
) -> PretrainedConfig:
    """Returns the configuration of a model that we can serve: a decoder, or if `pools`, any that
    takes one text. Raises ModelRefused."""
    config = parse_config(model_path, revision)
    _check_weight_files(model_path)
    _check_kind(model_path, config, pools=pools)
    _check_sizes(model_path, config)
    return config


def parse_config(model_path: str, revision: str = DEFAULT_REVISION) -> PretrainedConfig:
    """The configuration of any model that transformers knows. Raises ModelRefused."""
    check_place(model_path)
    _check_files(model_path)
    raw = _read_raw_config(model_path, revision)
    if "auto_map" in raw:
        raise ModelRefused(
            f"{model_path} brings its own code (auto_map in config.json); "
            "batchway never runs code that comes with a model"
        )
    _check_rotary(model_path, raw)
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


def _check_files(model_path: str) -> None:
    """Refuses a local folder with a file that is not a JSON object of limited size and depth."""
    if not Path(model_path).expanduser().is_dir():
        return
    files = ModelFiles(model_path, DEFAULT_REVISION)
    for name in _JSON_FILES:
        if files.find(name) is not None and not isinstance(files.read_json(name), dict):
            raise ModelRefused(f"{name} of {model_path} is no JSON object")


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


def _check_rotary(model_path: str, raw: Mapping[str, Any]) -> None:
    """Refuses numbers of rotary scaling with which transformers would fail oddly, or not at all."""
    inner = raw.get("text_config")
    for config in (raw, inner if isinstance(inner, dict) else {}):
        for parameters in map(config.get, ("rope_scaling", "rope_parameters")):
            for each in of_each_layer(parameters):
                for name in _ROTARY_NUMBERS:
                    number = each.get(name)
                    is_number = isinstance(number, int | float) and not isinstance(number, bool)
                    if number is not None and not (is_number and 0 < number <= _MAX_SIZE):
                        raise ModelRefused(
                            f"config.json of {model_path} has the rotary {name} {number!r}; it is "
                            "a number over 0"
                        )


def _read_raw_config(model_path: str, revision: str) -> dict[str, Any]:
    """config.json before any class interprets it."""
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


def _check_weight_files(model_path: str) -> None:
    """Refuses a local folder whose weights are not all there, or not where transformers looks."""
    folder = Path(model_path).expanduser()
    if not folder.is_dir() or (folder / "model.safetensors").is_file():
        return
    if not (folder / _INDEX).is_file():
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        raise ModelRefused(
            f"{model_path} holds {names[0]}, but neither model.safetensors nor {_INDEX}, by which "
            "weights are found"
        )
    shards = json.loads((folder / _INDEX).read_bytes()).get("weight_map")
    named = {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
    if missing := sorted(name for name in named if not (folder / name).is_file()):
        raise ModelRefused(
            f"{model_path} lacks {len(missing)} of the {len(named)} files of weights that {_INDEX} "
            f"names, for example {missing[0]}: it is not fully downloaded"
        )


def _check_kind(model_path: str, config: PretrainedConfig, *, pools: bool) -> None:
    """Refuses a model that neither generates nor pools, and quantised weights."""
    if config.is_encoder_decoder:
        raise ModelRefused(
            f"{model_path} is an encoder-decoder; batchway serves decoders, and encoders for "
            "embeddings and classes"
        )
    if pools and not hasattr(config.get_text_config(), "vocab_size"):
        raise ModelRefused(f"{model_path} is a {architecture_of(config)}, which takes no text")
    if not pools:
        _check_generates(model_path, config)
    if (method := _quantization_of(model_path, config)) is not None:
        is_known = not pools and method.startswith(_VLLM_METHODS)
        raise ModelRefused(
            f"the weights of {model_path} are quantised ({method}), which batchway's own engine "
            f"does not read: {'serve it by --engine vllm on a GPU, or ' if is_known else ''}take "
            "the checkpoint in bfloat16 (on a CPU --quantization int8 makes it smaller at load)"
        )


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


def _quantization_of(model_path: str, config: PretrainedConfig) -> str | None:
    """The method by which the checkpoint's weights are quantised."""
    for each in (config, config.get_text_config()):
        found = getattr(each, "quantization_config", None)
        if isinstance(found, dict) and found:
            is_bitsandbytes = any(name.startswith("load_in_") for name in found)
            named = found.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "unknown")
            return str(named)
        if isinstance(getattr(each, "quantization", None), dict):
            return "MLX"
    for name, method in (("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")):
        if (Path(model_path).expanduser() / name).is_file():
            return method
    return None


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
