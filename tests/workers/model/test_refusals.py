"""Folders that hold no model that batchway serves: each refusal names the true cause, and what
helps.
"""

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.tiny_models import VOCAB_SIZE, edit_json, random_model, save_tokenizer
from tests.tiny_registry import tiny_config
from tests.workers.model.loading import load, refusal
from workers.engine.interface import ModelRefused
from workers.model import tokenizer
from workers.model.model_path import check_place
from workers.model.tokenizer import tokenizer_refusal

# --- quantised checkpoints --------------------------------------------------------------------

_ON_VLLM: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 128},
    "awq": {"bits": 4, "zero_point": True, "version": "gemm"},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}},
    "mxfp4": {"modules_to_not_convert": []},
    "modelopt": {"quant_algo": "NVFP4"},
    "torchao": {"quant_type": "int4_weight_only"},
    "quark": {},
}
_ELSEWHERE = ("bitsandbytes", "hqq", "aqlm", "eetq", "quanto", "higgs", "vptq", "bitnet", "exl3")


@pytest.mark.parametrize("method", [*_ON_VLLM, *_ELSEWHERE, "no_such_method"])
def test_a_quantised_checkpoint_is_refused_by_its_method(llama: Path, method: str) -> None:
    """No advice to install something, which would not help; vLLM where it knows the method."""
    settings = {"quant_method": method, **_ON_VLLM.get(method, {})}
    edit_json(llama / "config.json", quantization_config=settings)

    sentence = refusal(llama)

    assert f"quantised ({method})" in sentence
    assert "bfloat16" in sentence
    assert ("--engine vllm on a GPU" in sentence) == (method in _ON_VLLM)
    assert "install" not in sentence


@pytest.mark.parametrize(
    ("file", "settings", "method"),
    [
        ("config.json", {"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ("config.json", {"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ],
)
def test_other_places_tell_of_quantised_weights_too(
    llama: Path, file: str, settings: dict[str, Any], method: str
) -> None:
    """An older form, another program's, and files beside the configuration."""
    path = llama / file
    path.write_text(path.read_text() if path.exists() else "{}")
    edit_json(path, **settings)

    assert f"quantised ({method})" in refusal(llama)


def test_an_empty_setting_is_none(llama: Path) -> None:
    edit_json(llama / "config.json", quantization_config=None)

    load(llama)


# --- other kinds of models --------------------------------------------------------------------

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": VOCAB_SIZE,
}
_DISTIL = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": VOCAB_SIZE}
_T5 = {"d_model": 32, "d_kv": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16}
_BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
    "d_model": 32,
}
_IMAGES = {key: value for key, value in _SMALL.items() if key != "vocab_size"} | {"image_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BertModel": ("BertConfig", _SMALL, "encoder"),
    "BertForMaskedLM": ("BertConfig", _SMALL, "encoder"),
    "BertForPreTraining": ("BertConfig", _SMALL, "encoder"),
    "RobertaModel": ("RobertaConfig", _SMALL, "encoder"),
    "RobertaForTokenClassification": ("RobertaConfig", _SMALL, "encoder"),
    "XLMRobertaForMaskedLM": ("XLMRobertaConfig", _SMALL, "encoder"),
    "ElectraForMaskedLM": ("ElectraConfig", _SMALL, "encoder"),
    "ModernBertModel": ("ModernBertConfig", _SMALL | {"pad_token_id": 0}, "encoder"),
    "DistilBertForQuestionAnswering": ("DistilBertConfig", _DISTIL, "encoder"),
    "ViTModel": ("ViTConfig", _IMAGES, "generates no text"),
    "ViTForImageClassification": ("ViTConfig", _IMAGES, "generates no text"),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": _SMALL, "vision_config": _IMAGES},
        "generates no text",
    ),
    "T5ForConditionalGeneration": ("T5Config", _T5 | {"vocab_size": VOCAB_SIZE}, "encoder-decoder"),
    "BartModel": ("BartConfig", _BART | {"vocab_size": VOCAB_SIZE}, "encoder-decoder"),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        _BART | {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "eos_token_id": 0},
        "encoder-decoder",
    ),
    "LlamaForTokenClassification": ("LlamaConfig", _SMALL, "generates no text"),
    "LlamaForQuestionAnswering": ("LlamaConfig", _SMALL, "generates no text"),
    "LlamaModel": ("LlamaConfig", _SMALL, "without the head"),
    "GPT2Model": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 1, "n_head": 2, "tie_word_embeddings": False},
        "without the head",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_another_kind_is_refused_by_its_kind(name: str, tmp_path: Path) -> None:
    """Saved by transformers' own class, without a modules.json."""
    config_name, sizes, words = KINDS[name]
    make: Callable[..., Any] = getattr(transformers, config_name)
    saved: Any = getattr(transformers, name)(make(**sizes))
    saved.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    sentence = refusal(tmp_path)

    assert words in sentence
    assert words == "encoder-decoder" or name in sentence
    assert ("modules.json" in sentence) == (words == "encoder")


def test_a_decoder_of_a_family_of_encoders_is_none(tmp_path: Path) -> None:
    """BERT that was trained as a decoder says so."""
    make: Callable[..., Any] = transformers.BertConfig
    saved: Any = transformers.BertLMHeadModel(make(**_SMALL, is_decoder=True))
    saved.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    load(tmp_path)


# --- folders without a model ------------------------------------------------------------------


def clear(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


_SETTINGS = '{"base_model_name_or_path": "some/base-8B", "peft_type": "LORA"}'
_ADAPTER = {"adapter_config.json": _SETTINGS, "adapter_model.safetensors": "x"}
_PICKLED_ADAPTER = {"adapter_config.json": _SETTINGS, "adapter_model.bin": "x"}
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n"
_SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
_INDEX = json.dumps({"weight_map": {f"layer.{n}": shard for n, shard in enumerate(_SHARDS)}})
_WEIGHTS = "*.safetensors"
# What is deleted from a model's folder, what is written there, and words of the refusal.
FOLDERS: dict[str, tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]] = {
    "adapter": (("*",), _ADAPTER, ("adapter of some/base-8B", "merge_and_unload")),
    "adapter with config": (
        (_WEIGHTS,),
        _ADAPTER,
        ("adapter of some/base-8B", "merge_and_unload"),
    ),
    "pickled adapter": (("*",), _PICKLED_ADAPTER, ("adapter of some/base-8B",)),
    "gguf": (("*",), {"model-Q4_K_M.gguf": "GGUF"}, ("no config.json", "GGUF")),
    "gguf with config": ((_WEIGHTS,), {"model.gguf": "GGUF"}, ("safetensors", "GGUF")),
    "pipeline": (("*",), {"model_index.json": "{}"}, ("diffusers pipeline",)),
    "maker's format": (
        ("config.json",),
        {"params.json": "{}"},
        ("params.json", "Hugging Face format"),
    ),
    "inner folder": (
        ("config.json",),
        {"final/config.json": "{}"},
        ("no config.json", "sub-folder final"),
    ),
    "empty": (("*",), {}, ("the folder is empty",)),
    "something else": (("*.json",), {}, ("it is no model folder",)),
    "no weights": ((_WEIGHTS,), {}, ("no weights at all",)),
    "pickled": ((_WEIGHTS,), {"pytorch_model.bin": "x"}, ("safetensors", "pickled")),
    "onnx": ((_WEIGHTS,), {"model.onnx": "x"}, ("safetensors", "ONNX")),
    "tensorflow": ((_WEIGHTS,), {"tf_model.h5": "x"}, ("safetensors", "TensorFlow")),
    "flax": ((_WEIGHTS,), {"flax_model.msgpack": "x"}, ("safetensors", "Flax")),
    "weights in lfs": ((), {"model.safetensors": _POINTER}, ("model.safetensors", "git lfs pull")),
    "tokenizer in lfs": ((), {"tokenizer.json": _POINTER}, ("tokenizer.json", "git lfs pull")),
    "missing shards": (
        (_WEIGHTS,),
        {_SHARDS[0]: "x", "model.safetensors.index.json": _INDEX},
        ("2 of the 3 files", "model-00002-of-00003.safetensors"),
    ),
    "weights of another name": (
        (_WEIGHTS,),
        {"weights.safetensors": "x"},
        ("weights.safetensors", "model.safetensors"),
    ),
    "no tokenizer": (("*token*", "*.jinja"), {}, ("has no tokenizer", "tokenizer.model")),
    "a tokenizer's settings alone": (
        ("tokenizer.json",),
        {},
        ("has no tokenizer", "tokenizer.json"),
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_without_a_model_is_refused_by_what_it_is(name: str, llama: Path) -> None:
    deleted, files, words = FOLDERS[name]
    clear(llama, *deleted)
    write(llama, files)

    sentence = refusal(llama)

    for word in words:
        assert word in sentence
    assert "install" not in sentence


def test_a_whole_model_may_keep_an_adapter_and_pointers_that_it_does_not_need(llama: Path) -> None:
    """Merged, with the adapter left beside it, and other formats that nobody fetched."""
    save_file({"lora_A.weight": torch.zeros(1)}, llama / "adapter_model.safetensors")
    others = ("original.pth", "model.gguf", "consolidated.safetensors", "tokenizer.model")
    write(llama, {"adapter_config.json": _SETTINGS} | dict.fromkeys(others, _POINTER))

    load(llama)


@pytest.mark.parametrize("settings", ["{", "[]", '{"base_model_name_or_path": 5}', "{}"])
def test_an_adapters_base_may_be_unknown(llama: Path, settings: str) -> None:
    clear(llama, "*")
    write(llama, _ADAPTER | {"adapter_config.json": settings})

    assert "is an adapter and no whole model" in refusal(llama)


@pytest.mark.parametrize(
    ("name", "word"), [("model.gguf", "GGUF"), ("model.bin", "pickled"), ("config.json", "folder")]
)
def test_a_file_in_place_of_a_folder_is_refused(llama: Path, name: str, word: str) -> None:
    (llama / name).touch()

    with pytest.raises(ModelRefused, match=word) as caught:
        check_place(str(llama / name))
    assert "is a file" in str(caught.value)


# --- tokenizers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "said", "words"),
    [
        (("sentencepiece",), "`tiktoken` is required", "sentencepiece: pip install sentencepiece"),
        (("google.protobuf",), "`tiktoken` is required", "protobuf: pip install protobuf"),
        (
            ("sentencepiece", "google.protobuf", "tiktoken"),
            "`tiktoken` is required",
            "sentencepiece and protobuf: pip install sentencepiece protobuf",
        ),
        (("tiktoken",), "`tiktoken` is required", "tiktoken: pip install tiktoken"),
        ((), "MistralConverter requires the mistral-common library", "pip install mistral-common"),
        ((), "Couldn't instantiate the backend tokenizer from one of:", "has no tokenizer: none"),
        ((), "the file is damaged\nand more", "can be loaded: the file is damaged"),
    ],
)
def test_a_missing_package_is_named(
    missing: tuple[str, ...], said: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several, the one that reads this file: transformers names the last that it has tried."""
    monkeypatch.setattr(tokenizer, "_has", lambda module: module not in missing)

    sentence = tokenizer_refusal("model", ValueError(said))

    assert words in sentence
    assert "\n" not in sentence


def test_packages_that_do_not_help_are_not_asked_for() -> None:
    """A tokenizer that is a program has no fast form, whatever is installed."""
    sentence = tokenizer_refusal("model", ImportError("You need to install sacremoses to use it."))

    assert "gateways cannot run" in sentence


@pytest.mark.campaign
def test_without_sentencepiece_a_tokenizer_model_names_it(llama: Path) -> None:
    """In a process of its own, which does not find the package."""
    clear(llama, "tokenizer.json", "special_tokens_map.json")
    (llama / "tokenizer.model").write_bytes(b"\x0a\x05")
    program = """
        import importlib.util, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: (
            None if name == "sentencepiece" else find(name, *rest)
        )
        sys.modules["sentencepiece"] = None
        from workers.engine.interface import ModelRefused
        from workers.model.tokenizer import read_tokenizer
        try:
            read_tokenizer(sys.argv[1])
        except ModelRefused as refusal:
            print(refusal)
    """

    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(llama)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert re.search("the worker needs sentencepiece: pip install sentencepiece", found.stdout)


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }", "{{ messages | no_such_filter }}", "{%"]
)
def test_a_chat_template_that_does_not_compile_is_refused(llama: Path, template: str) -> None:
    """Each chat would fail; base models have none, which is no fault."""
    (llama / "chat_template.jinja").write_text(template)

    assert "does not compile" in refusal(llama)


# --- wrong fields of config.json --------------------------------------------------------------

_WRONG: list[Any] = ["x", None, -1, 0, 3, 1.5, [], {}, True, [7]]


@pytest.mark.parametrize("value", _WRONG, ids=repr)
@pytest.mark.parametrize("model_type", ["gemma4_text", "qwen3_moe", "mamba2", "deepseek_v2"])
@pytest.mark.each_value
def test_a_wrong_field_is_a_reason_or_no_fault(model_type: str, value: Any, tmp_path: Path) -> None:
    """Every fifth field of a family's configuration, each with this value: it loads, or is refused
    in a sentence."""
    config = tiny_config(type(transformers.AutoConfig.for_model(model_type)))
    random_model(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    file = tmp_path / "config.json"
    written = file.read_text()
    sentences = []
    for name in list(json.loads(written))[_WRONG.index(value) % 5 :: 5]:
        file.write_text(written)
        edit_json(file, **{name: value})
        try:
            load(tmp_path, kv_memory_bytes=2**24)
        except ModelRefused as refused:
            sentences.append(str(refused))
    assert sentences
    assert all(0 < len(each) < 600 and "\n" not in each for each in sentences)
