"""Mistakes that a model's small files and the headers of its weights show are told before torch is
imported, in one sentence that names the file: by the check, by the engine process, by `up`.
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.tiny_models import edit_json, save_tokenizer
from tests.workers.model.loading import load
from workers.engine.interface import ModelRefused
from workers.model.folder_check import check_folder

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"


def make_weights(prefix: str = "model.") -> dict[str, Any]:
    """The names and shapes of a llama's weights; all zeros."""
    shapes = {"lm_head": (320, 64), f"{prefix}embed_tokens": (320, 64), f"{prefix}norm": (64,)}
    for number in range(2):
        layer = f"{prefix}layers.{number}"
        for name, shape in {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}.items():
            shapes[f"{layer}.self_attn.{name}_proj"] = shape
        for name, shape in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
            shapes[f"{layer}.mlp.{name}_proj"] = shape
        for name in ("input", "post_attention"):
            shapes[f"{layer}.{name}_layernorm"] = (64,)
    return {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}


def save_sharded(folder: Path, weights: Mapping[str, Any]) -> None:
    """Into three files with an index."""
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    of_file = {tensor: names[number % 3] for number, tensor in enumerate(sorted(weights))}
    for name in names:
        save_file({t: weights[t] for t in weights if of_file[t] == name}, folder / name)
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": of_file}))


def make_folder(folder: Path, kind: str) -> Path:
    """A llama in one file, in several, or as the text model within a larger one."""
    folder.mkdir()
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config |= _SIZES
    weights = make_weights("model.language_model." if kind == "nested" else "model.")
    if kind == "nested":
        config = {"model_type": "llava", "text_config": config}
        # A tower beside it has other sizes under the same names.
        tower = "model.vision_tower.layers.0.self_attn.q_proj.weight"
        weights[tower] = np.zeros((8, 8), np.float32)
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "sharded":
        save_sharded(folder, weights)
    else:
        save_file(weights, folder / _WEIGHTS)
    save_tokenizer(folder)
    return folder


KINDS = ("single", "sharded", "nested")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each kind, in order."""
    root = tmp_path_factory.mktemp("folders")
    return {kind: make_folder(root / kind, kind) for kind in KINDS}


# --- the mistakes -------------------------------------------------------------------------------


def weight_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cut(name: str, share: float = 0.5) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = weight_file(folder) if name == _WEIGHTS else folder / name
        file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    return change


def write(name: str, text: str, encoding: str = "utf-8") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text, encoding)

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def edit(**changes: Any) -> Callable[[Path], None]:
    """Changes config.json, or the text model within it where the field is there."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        inner = config.get("text_config", {})
        for name, value in changes.items():
            (inner if name in inner and name != "model_type" else config)[name] = value
        file.write_text(json.dumps(config))

    return change


def edit_tokenizer(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", **changes)

    return change


def remove(*patterns: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return change


def damage_header(folder: Path) -> None:
    file = weight_file(folder)
    data = bytearray(file.read_bytes())
    data[40:44] = b"\xff" * 4
    file.write_bytes(data)


def lengthen_header(folder: Path) -> None:
    file = weight_file(folder)
    file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])


def add_bytes(folder: Path) -> None:
    file = weight_file(folder)
    file.write_bytes(file.read_bytes() + b"\0" * 100)


def replace_by_pickle(folder: Path) -> None:
    remove("*.safetensors", _INDEX)(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")


def replace_by_pointer(folder: Path) -> None:
    weights = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n"
    weight_file(folder).write_text(weights)


def lose_a_shard(folder: Path) -> None:
    if not (folder / _INDEX).exists():
        save_sharded(folder, load_file(folder / _WEIGHTS))
        (folder / _WEIGHTS).unlink()
    weight_file(folder).unlink()


def mix_downloads(folder: Path) -> None:
    """The first file stands for the second, too."""
    lose_a_shard(folder)
    shutil.copy(weight_file(folder), folder / "model-00001-of-00003.safetensors")


def transpose(folder: Path) -> None:
    """One matrix of one layer."""
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name in weights:
            if name.endswith("layers.1.mlp.down_proj.weight"):
                weights[name] = np.ascontiguousarray(weights[name].T)
        save_file(weights, file)


_GPTQ = {"quant_method": "gptq", "bits": 4}
_CONFIG, _SETTINGS = "config.json", "tokenizer_config.json"
# What is done to a folder, and words of the sentence.
MISTAKES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no JSON": (cut(_CONFIG), (_CONFIG, "cannot be read as JSON")),
    "no object": (write(_CONFIG, "[]"), (_CONFIG, "is no JSON object")),
    "null": (write("generation_config.json", "null"), ("generation_config.json", "no JSON object")),
    "no text": (write(_SETTINGS, "\x00{"), (_SETTINGS, "cannot be read as JSON")),
    "deep JSON": (write(_SETTINGS, "[" * 10**5), (_SETTINGS, "nests too deeply")),
    "auto_map": (edit(auto_map={"AutoModel": "m.M"}), ("auto_map in config.json", "never runs")),
    "auto_map of the tokenizer": (
        edit_tokenizer(auto_map={"AutoTokenizer": ["m.T", None]}),
        (f"auto_map in {_SETTINGS}", "never runs"),
    ),
    "quantised": (edit(quantization_config=_GPTQ), ("quantised (gptq)",)),
    "MLX": (edit(quantization={"bits": 4}), ("quantised (MLX)",)),
    "unknown type": (edit(model_type="llama9"), (_CONFIG, "model_type llama9", "transformers 5")),
    "no type": (edit(model_type=None), (_CONFIG, "model_type None")),
    "a type that is none": (edit(model_type="*"), (_CONFIG, "model_type *")),
    "encoder-decoder": (edit(is_encoder_decoder=True), ("encoder-decoder",)),
    "rotary": (edit(rope_scaling={"factor": -1}), (_CONFIG, "the rotary factor -1")),
    "template": (
        write("chat_template.jinja", "\n{% for m in messages %}{{ m.content }"),
        ("chat_template.jinja", "does not compile", "in line 2"),
    ),
    "template in no UTF-8": (
        write("chat_template.jinja", "ä", encoding="latin-1"),
        ("chat_template.jinja", "is no text"),
    ),
    "filter of a template": (
        write("chat_template.jinja", "{{ messages | no_such_filter }}"),
        ("chat_template.jinja", "does not compile"),
    ),
    "template in the settings": (
        both(remove("*.jinja"), edit_tokenizer(chat_template="{%")),
        (f"chat_template in {_SETTINGS}", "does not compile"),
    ),
    "template for tools": (
        both(
            remove("*.jinja"),
            edit_tokenizer(chat_template=[{"name": "tool_use", "template": "{{"}]),
        ),
        (f"chat_template in {_SETTINGS}", "does not compile"),
    ),
    "template that is no text": (
        both(remove("*.jinja"), edit_tokenizer(chat_template=5)),
        (f"chat_template in {_SETTINGS}", "is no text"),
    ),
    "no tokenizer": (remove("*token*", "*.jinja"), ("has no tokenizer", "tokenizer.json")),
    "cut tokenizer": (cut("tokenizer.json"), ("tokenizer.json", "cannot be read as JSON")),
    "other tokenizer": (write("tokenizer.json", "{}"), ("tokenizer.json", "is no tokenizer that")),
    "vocabulary": (edit(vocab_size=1000), ("has 320 rows", "config.json has vocab_size 1000")),
    "cut weights": (cut(_WEIGHTS), (".safetensors of", "cut or damaged")),
    "cut header": (cut(_WEIGHTS, 0.001), (".safetensors of", "cut or damaged")),
    "no weights": (cut(_WEIGHTS, 0), (".safetensors of", "cut or damaged")),
    "damaged header": (damage_header, (".safetensors of", "cut or damaged")),
    "long header": (lengthen_header, (".safetensors of", "cut or damaged")),
    "more bytes": (add_bytes, (".safetensors of", "cut or damaged")),
    "a lost shard": (lose_a_shard, ("lacks 1 of the 3 files", "model-00001-of-00003.safetensors")),
    "two downloads": (mix_downloads, (_INDEX, "which none of its files holds")),
    "pickled": (replace_by_pickle, ("no weights in safetensors format", "pickled")),
    "Git LFS": (replace_by_pointer, (".safetensors of", "git lfs pull")),
}
# Those of one kind of folder.
_OF_KIND: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "layers": (
        "sharded",
        edit(num_hidden_layers=3),
        ("num_hidden_layers 3", "layer 2 are missing"),
    ),
    "hidden size": ("single", edit(hidden_size=32), ("config.json has hidden_size 32",)),
    "intermediate size": ("single", edit(intermediate_size=9), ("has intermediate_size 9",)),
    "heads": ("sharded", edit(num_attention_heads=8), ("num_attention_heads 8 and head_dim 16",)),
    "KV heads": ("single", edit(num_key_value_heads=4), ("num_key_value_heads 4 and head_dim 16",)),
    "a transposed matrix": ("sharded", transpose, ("layers.1.mlp.down_proj.weight", "96 rows")),
    "no index": ("sharded", remove(_INDEX), ("neither model.safetensors nor", _INDEX)),
    "an empty index": ("sharded", write(_INDEX, "{}"), (_INDEX, "has no weight_map")),
    "modules with code": (
        "single",
        write("modules.json", '[{"type": "m.M", "path": ""}]'),
        ("modules.json",),
    ),
    "a damaged index": ("sharded", cut(_INDEX), (_INDEX, "cannot be read as JSON")),
}
CASES = {
    f"{kind}, {name}": (kind, change, words)
    for name, (change, words) in MISTAKES.items()
    for kind in KINDS
} | {f"{kind}, {name}": (kind, change, words) for name, (kind, change, words) in _OF_KIND.items()}

# Each folder in three ways; prints what is said, and whether torch was imported for it.
_PROGRAM = """
import contextlib, io, json, sys
from infra.cli import main
from workers.engine.interface import ModelRefused
from workers.engine_process.engine_loop import load_torch_model
from workers.ipc.messages import EngineOptions
from workers.model.folder_check import check_folder
from workers.model.pooling.folder import read_folder

for folder in sys.argv[1:]:
    said = []
    for check in (
        lambda: (check_folder(folder), read_folder(folder)),
        lambda: load_torch_model(EngineOptions(model_path=folder), lambda text: None),
    ):
        try:
            said.append(check())
        except ModelRefused as exc:
            said.append(str(exc))
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        status = main(["up", "--port=0", "--model=" + folder])
    heavy = sorted({"torch", "transformers"} & sys.modules.keys())
    print(json.dumps([said, status, errors.getvalue().splitlines()[-1:], heavy]))
"""


@pytest.fixture(scope="module")
def told(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without torch says of each case."""
    root = tmp_path_factory.mktemp("mistakes")
    made = []
    for name, (kind, change, _) in CASES.items():
        folder = root / name.replace(" ", "_")
        shutil.copytree(folders[kind], folder)
        change(folder)
        made.append(str(folder))
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *made], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_without_torch(name: str, told: dict[str, Any]) -> None:
    """In the same sentence by the check, the engine process, and `up`, which starts nothing."""
    (sentence, by_engine), status, by_up, heavy = told[name]

    for word in CASES[name][2]:
        assert word in sentence
    assert "\n" not in sentence
    assert len(sentence) < 600
    assert by_engine == sentence
    assert (status, by_up) == (2, [f"batchway up: --model: {sentence}"])
    assert heavy == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_without_a_mistake_is_not_refused(kind: str, folders: dict[str, Path]) -> None:
    """Nor one without a chat template, or with a template that no chat uses."""
    assert sentence_of(folders[kind]) == ""
    settings_file = folders[kind] / _SETTINGS
    before = settings_file.read_text()
    template = folders[kind] / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    without = sentence_of(folders[kind])
    edit_json(settings_file, chat_template=[{"name": "rag", "template": "{%"}])
    with_another = sentence_of(folders[kind])
    settings_file.write_text(before)
    template.write_text(text)
    assert (without, with_another) == ("", "")


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_what_passes_is_loaded(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The folders of these tests are models."""
    folder = shutil.copytree(folders[kind], tmp_path / "m")
    for file in folder.glob("*.safetensors"):
        rng = np.random.default_rng(0)
        weights = {n: rng.standard_normal(w.shape, "f4") for n, w in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})

    load(folder)


def sentence_of(folder: Path) -> str:
    """The refusal; empty without one."""
    try:
        check_folder(str(folder))
    except ModelRefused as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_in_a_sentence_or_harmless(
    kind: str, folders: dict[str, Path], data: st.DataObject
) -> None:
    """Of any file of a folder, at any place: bytes are changed, cut out or put in."""
    names = sorted(file.name for file in folders[kind].iterdir())
    file = folders[kind] / data.draw(st.sampled_from(names))
    before = file.read_bytes()
    head, anywhere = st.integers(0, min(len(before), 4096)), st.integers(0, len(before))
    start = data.draw(st.one_of(head, anywhere))
    num_lost = data.draw(st.sampled_from([0, 1, 4, 100, len(before)]))
    put_in = data.draw(st.binary(max_size=8))
    file.write_bytes(before[:start] + put_in + before[start + num_lost :])
    try:
        said = sentence_of(folders[kind])
    finally:
        file.write_bytes(before)
    assert "\n" not in said
    assert not said or str(folders[kind]) in said


@pytest.mark.parametrize("seed", range(20))
def test_headers_with_other_values_are_refused_or_harmless(seed: int, tmp_path: Path) -> None:
    """JSON that is well formed, with one value exchanged for one of another type or size."""
    rng = random.Random(seed)
    folder = make_folder(tmp_path / "m", "sharded")
    for name in (_CONFIG, _INDEX, _SETTINGS, "tokenizer.json"):
        value = json.loads((folder / name).read_text())
        for _ in range(10):
            key = rng.choice(sorted(value))
            others: tuple[Any, ...] = (None, -1, 2**70, 1.5, "x", [], {}, [{}], {"x": None}, True)
            changed = value | {key: rng.choice(others)}
            (folder / name).write_text(json.dumps(changed))
            assert "\n" not in sentence_of(folder)
        (folder / name).write_text(json.dumps(value))
