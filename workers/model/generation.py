"""What a model's files say about generating: its sampling settings and its end tokens.

Reads the raw files: what transformers makes of them lacks some of their values. Applies nothing;
gateways apply the settings where a caller gives none, and the engine ends at the tokens.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import fields
from tokenizers import Tokenizer
from transformers import PretrainedConfig

from contract.model_cards import MAX_EOS_TOKENS, GenerationDefaults, TokenizerFiles
from workers.engine.interface import ModelRefused
from workers.model.files import ModelFiles

_FILE = "generation_config.json"
_NAMES = tuple(field.name for field in fields(GenerationDefaults))
# Before generation_config.json the settings stood in config.json, where transformers wrote its
# defaults too: those say nothing of the model.
_OLD_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
_MAX_TOKEN_ID = 2**31 - 1


def sampling_defaults(files: ModelFiles, vocab_size: int) -> GenerationDefaults:
    """The sampling settings of generation_config.json; without that file, those of an old
    config.json. As in vLLM, `do_sample` is not read. Raises ModelRefused."""
    found, name = files.read_object(_FILE), _FILE
    if files.find(_FILE) is None:
        found, name = _old_settings(files.read_object("config.json")), "config.json"
    given = {key: found[key] for key in _NAMES if found.get(key) is not None}
    if given.get("top_k") in (-1, 0):
        del given["top_k"]  # off
    try:
        defaults = msgspec.convert(given, GenerationDefaults)
    except msgspec.ValidationError as exc:
        raise ModelRefused(_refusal(files, name, exc)) from exc
    if wrong := [i for i in defaults.suppress_tokens if i >= vocab_size]:
        raise ModelRefused(
            f"{name} of {files.model_path} has suppress_tokens {wrong[0]}, which is none of the "
            f"model's {vocab_size} tokens; --generation-config none ignores the sampling settings"
        )
    return defaults


def _old_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    found = {**(inner if isinstance(inner, dict) else {}), **config}
    return {
        name: found[name]
        for name in (*_OLD_DEFAULTS, "suppress_tokens")
        if name in found and found[name] != _OLD_DEFAULTS.get(name)
    }


def _refusal(files: ModelFiles, name: str, exc: msgspec.ValidationError) -> str:
    reason, _, path = str(exc).partition(" - at `$.")
    return (
        f"{name} of {files.model_path} has an impossible {path.rstrip('`')}: {reason}; "
        "--generation-config none ignores the sampling settings"
    )


def end_token_ids(
    files: ModelFiles, config: PretrainedConfig, tokenizer: TokenizerFiles
) -> tuple[int, ...]:
    """The tokens that end an answer: those of the configuration, of generation_config.json, and the
    tokenizer's own, which alone is right in many fine-tunes. Raises ModelRefused."""
    text = config.get_text_config()
    named = (
        getattr(text, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        files.read_object(_FILE).get("eos_token_id"),
        _tokenizer_ends(files, tokenizer),
    )
    found: set[int] = set()
    for value in named:
        for token_id in value if isinstance(value, list | tuple) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
                raise ModelRefused(f"{files.model_path} names an end token that is no token id")
            found.add(token_id)
    if len(found) > MAX_EOS_TOKENS:
        raise ModelRefused(
            f"{files.model_path} names {len(found)} end tokens, over {MAX_EOS_TOKENS}"
        )
    # A tokenizer may have tokens that the model never gives.
    return tuple(sorted(token_id for token_id in found if token_id < text.vocab_size))


def _tokenizer_ends(files: ModelFiles, tokenizer: TokenizerFiles) -> list[int | None]:
    """The tokenizer's end tokens; those of special_tokens_map.json are often missing in
    transformers."""
    tokens = {tokenizer.special_tokens.get("eos_token")}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = files.read_object(name).get("eos_token")
        tokens.add(token.get("content") if isinstance(token, dict) else token)
    fast = Tokenizer.from_str(tokenizer.tokenizer_json)
    return [fast.token_to_id(token) for token in tokens if isinstance(token, str)]
