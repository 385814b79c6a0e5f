"""Checks a model's small files and the headers of its weights, before torch is imported, which
takes seconds. The loader checks again what it then reads.

Refuses only what could not be served: where the files do not tell, the loader decides.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import jinja2
from jinja2 import meta
from tokenizers import Tokenizer

from workers.engine.interface import ModelRefused
from workers.model.files import DEFAULT_REVISION, ModelFiles
from workers.model.model_path import check_on_hub, check_place
from workers.model.model_types_compat import knows_model_type
from workers.model.weight_headers import INDEX, check_weights

# Files that transformers reads as JSON, with their size limits. tokenizer.json has its own reader.
_JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", INDEX),
)
# Methods of quantised checkpoints that vLLM reads on a GPU.
_VLLM_METHODS = (
    *("awq", "gptq", "fp8", "compressed-tensors", "mxfp4", "modelopt", "quark", "torchao"),
)
_ROTARY_NUMBERS = ("factor", "original_max_position_embeddings")
_MAX_ROTARY = 2**31 - 1


def check_folder(model_path: str, revision: str | None = None) -> None:
    """Refuses a model that batchway's own engine cannot serve, by its files. Of a model of the Hub
    only config.json is read. Raises ModelRefused."""
    files = ModelFiles(model_path, revision or DEFAULT_REVISION)
    check_checkpoint(files)
    if files.is_local:
        _check_tokenizer(files)


def check_checkpoint(files: ModelFiles) -> None:
    """As `check_folder`, without the tokenizer. Raises ModelRefused."""
    raw = check_config(files)
    refuse_encoder_decoder(files.model_path, raw.get("is_encoder_decoder"))
    _check_quantisation(files, raw)
    if files.is_local:
        check_weights(files, raw, _inner(raw))


def check_config(files: ModelFiles) -> dict[str, Any]:
    """config.json before any class interprets it. Refuses what no engine could read: a place
    without a model, damaged JSON, own code, an unknown type, impossible rotary numbers. Raises
    ModelRefused."""
    path = files.model_path
    check_place(path)
    check_on_hub(path, files.revision)
    for name in _JSON_FILES if files.is_local else ():
        files.read_object(name)
    raw = files.read_object("config.json")
    refuse_own_code(files, "config.json")
    model_type = str(raw.get("model_type"))
    if not knows_model_type(model_type):
        raise ModelRefused(
            f"config.json of {path} has the model_type {model_type[:100]}, which transformers "
            f"{version('transformers')} does not know; a newer release may"
        )
    _check_rotary(path, raw)
    return raw


def of_each_layer(parameters: Any) -> list[Mapping[str, Any]]:
    """The rotary parameters of each kind of layer that has its own, or those of all layers."""
    if not isinstance(parameters, Mapping):
        return []
    by_layer = [each for each in parameters.values() if isinstance(each, Mapping)]
    return by_layer or [parameters]


def _check_rotary(model_path: str, raw: Mapping[str, Any]) -> None:
    """Refuses numbers of rotary scaling with which transformers would fail oddly, or not at all."""
    for config in (raw, _inner(raw)):
        for parameters in map(config.get, ("rope_scaling", "rope_parameters")):
            for each in of_each_layer(parameters):
                for name in _ROTARY_NUMBERS:
                    number = each.get(name)
                    is_number = isinstance(number, int | float) and not isinstance(number, bool)
                    if number is not None and not (is_number and 0 < number <= _MAX_ROTARY):
                        raise ModelRefused(
                            f"config.json of {model_path} has the rotary {name} {number!r}; it is "
                            "a number over 0"
                        )


def _inner(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text model within that of a larger one; empty if there is none."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else {}


def refuse_encoder_decoder(model_path: str, is_encoder_decoder: Any) -> None:
    if is_encoder_decoder:
        raise ModelRefused(
            f"{model_path} is an encoder-decoder; batchway serves decoders, and encoders for "
            "embeddings and classes"
        )


def _check_quantisation(files: ModelFiles, raw: Mapping[str, Any]) -> None:
    if (method := _quantization_of(files, raw)) is None:
        return
    is_known = method.startswith(_VLLM_METHODS) and files.find("modules.json") is None
    raise ModelRefused(
        f"the weights of {files.model_path} are quantised ({method}), which batchway's own engine "
        f"does not read: {'serve it by --engine vllm on a GPU, or ' if is_known else ''}take "
        "the checkpoint in bfloat16 (on a CPU --quantization int8 makes it smaller at load)"
    )


def _quantization_of(files: ModelFiles, raw: Mapping[str, Any]) -> str | None:
    """The method by which the checkpoint's weights are quantised."""
    for config in (raw, _inner(raw)):
        found = config.get("quantization_config")
        if isinstance(found, dict) and found:
            is_bitsandbytes = any(name.startswith("load_in_") for name in found)
            named = found.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "unknown")
            return str(named)
        if isinstance(config.get("quantization"), dict):
            return "MLX"
    for name, method in (("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")):
        if files.is_local and files.find(name) is not None:
            return method
    return None


# --- tokenizer and chat templates ---------------------------------------------------------------

_MAX_TEMPLATE_CHARS = 2**20
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # transformers' own tag
# Variables that every chat's template gets, and functions that it may call.
_COMMON = {
    *("messages", "tools", "documents", "add_generation_prompt"),
    *("dict", "namespace", "raise_exception", "range", "strftime_now"),
}
TOKENIZER_FILES = (
    "tokenizer.json, tokenizer.model, tekken.json, vocab.txt, or vocab.json with merges.txt"
)
# Whatever transformers makes a tokenizer of has such a name.
_OF_TOKENIZER = re.compile(
    r"tokenizer(?!_config\.json$)|vocab|tekken|tiktoken|spiece|sentencepiece|spm|bpe|merges|\.model$"
)


def _check_tokenizer(files: ModelFiles) -> None:
    """Refuses a tokenizer with code of its own, a missing or damaged one, and templates that do not
    compile."""
    path = files.model_path
    refuse_own_code(files, "tokenizer_config.json")
    if (fast := files.find("tokenizer.json")) is not None:
        try:
            Tokenizer.from_file(str(fast))
        except Exception as exc:  # tokenizers raises no narrower one
            files.read_json("tokenizer.json")  # tells what is no JSON
            raise ModelRefused(
                f"tokenizer.json of {path} is no tokenizer that tokenizers {version('tokenizers')} "
                "reads; a newer release may"
            ) from exc
    elif not any(_OF_TOKENIZER.search(file.name) for file in files.folder.iterdir()):
        raise ModelRefused(f"{path} has no tokenizer: none of {TOKENIZER_FILES}")
    for where, template in _templates(files):
        template_variables(where, template)


def refuse_own_code(files: ModelFiles, name: str) -> None:
    if "auto_map" in files.read_object(name):
        raise ModelRefused(
            f"{files.model_path} brings its own code (auto_map in {name}); batchway never runs "
            "code that comes with a model"
        )


def _templates(files: ModelFiles) -> Iterator[tuple[str, Any]]:
    """The templates of a folder that chats use, with where they are."""
    if (file := files.find("chat_template.jinja")) is not None:
        template: Any = file.read_bytes()
        with suppress(UnicodeDecodeError):  # it is no text
            template = template.decode()
        yield f"chat_template.jinja of {files.model_path}", template
        return
    found = files.read_object("tokenizer_config.json").get("chat_template")
    for each in found if isinstance(found, list) else [{"name": "default", "template": found}]:
        if isinstance(each, dict) and each.get("name") in ("default", "tool_use"):
            where = f"the chat_template in tokenizer_config.json of {files.model_path}"
            yield where, each.get("template")


def template_variables(where: str, template: Any) -> set[str]:
    """The variables that a template reads beyond those of every chat; none without a template.
    Raises ModelRefused if it is no text, too long, or does not compile."""
    if template is None:
        return set()
    if not isinstance(template, str):
        raise ModelRefused(f"{where} is no text")
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ModelRefused(f"{where} has {len(template)} characters, over {_MAX_TEMPLATE_CHARS}")
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
        return meta.find_undeclared_variables(parsed) - _COMMON
    except (jinja2.TemplateError, RecursionError) as exc:
        line = f" in line {exc.lineno}" if isinstance(exc, jinja2.TemplateSyntaxError) else ""
        reason = str(exc).partition("\n")[0]
        raise ModelRefused(f"{where} does not compile: {reason}{line}") from exc
