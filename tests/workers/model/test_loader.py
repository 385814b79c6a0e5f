"""What the loader accepts, reports and refuses. Each refusal is one sentence for the operator."""

import gc
import struct
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.tiny_models import (
    CHAT_TEMPLATE,
    EOS_ID,
    VOCAB_SIZE,
    edit_json,
    make_model,
    save_tiny_model,
)
from tests.workers.model.conftest import paged, sequential
from tests.workers.model.loading import load, refusal
from workers.engine_process.engine_loop import load_torch_model
from workers.engine_process.engine_setup import limits_of
from workers.ipc.messages import EngineOptions
from workers.model import loader, memory
from workers.model.attention.interface import RowSpan
from workers.model.attention.reference import ReferenceAttention


def test_a_loaded_model_reports_what_gateways_need(saved_llama: Path) -> None:
    """Lengths, end tokens, tokenizer and template, and progress messages."""
    lines: list[str] = []

    loaded = load(saved_llama, lines)

    assert (loaded.context_length, loaded.vocab_size) == (512, VOCAB_SIZE)
    assert loaded.eos_token_ids == (EOS_ID,)
    assert loaded.model.eos_token_ids == frozenset({EOS_ID})
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    assert tokenizer.decode(tokenizer.encode("Grüße!").ids) == "Grüße!"
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.tokenizer.special_tokens["eos_token"] == "</s>"
    assert any("float32 on cpu" in line for line in lines)


def test_a_step_on_a_cpu_is_small_by_default(saved_llama: Path) -> None:
    """A larger step would only delay streams there."""
    num_tokens = load(saved_llama).num_step_tokens

    assert num_tokens == 256
    by_device = limits_of(EngineOptions(model_path="m"), VOCAB_SIZE, num_tokens)
    assert by_device.max_num_batched_tokens == 256
    asked = EngineOptions(model_path="m", max_num_batched_tokens=1000)
    assert limits_of(asked, VOCAB_SIZE, num_tokens).max_num_batched_tokens == 1000


def test_a_revision_pins_every_file(saved_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration, end tokens, tokenizer and weights. For a folder it has no effect."""
    asked: list[Any] = []

    def spy(name: str) -> None:
        original = getattr(loader, name)

        def call(*arguments: Any, **named: Any) -> Any:
            asked.append(arguments[-1])
            return original(*arguments, **named)

        monkeypatch.setattr(loader, name, call)

    for name in ("read_config", "ModelFiles", "read_tokenizer", "load_decoder"):
        spy(name)

    load(saved_llama, revision="0123abc")

    assert asked == ["0123abc"] * 4


def test_a_tokenizer_without_a_template_is_accepted(llama: Path) -> None:
    """Base models have none."""
    (llama / "chat_template.jinja").unlink()

    assert load(llama).tokenizer.chat_template is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kv_cache_has_the_requested_type_device_and_size(saved_llama: Path, dtype: str) -> None:
    """As many blocks as fit into the bytes, and one for padding; each layer's tensor is shaped in
    blocks."""
    loaded = load(saved_llama, dtype=dtype, kv_memory_bytes=200_000, block_size=8)

    cache = paged(loaded).cache
    element_bytes = {"float32": 4}.get(dtype, 2)
    block_bytes = 8 * 2 * 2 * 2 * 16 * element_bytes  # tokens, layers, K and V, heads, size
    assert loaded.model.num_blocks == min(200_000 // block_bytes, 4 * 512 // 8)
    assert loaded.model.block_size == 8
    assert cache.num_bytes == (loaded.model.num_blocks + 1) * block_bytes
    assert len(cache.layers) == 2
    for layer in cache.layers.values():
        for tensor in (layer.keys, layer.values):
            assert tensor.shape == (loaded.model.num_blocks + 1, 8, 2, 16)
            assert tensor.dtype == getattr(torch, dtype)
            assert tensor.device.type == "cpu"


def test_the_default_cache_holds_every_sequence_if_memory_allows(
    saved_llama: Path,
) -> None:
    """Each with the longest context, and no more than that."""
    loaded = load(saved_llama, max_model_len=100, max_num_seqs=3)

    assert loaded.context_length == loaded.model.max_model_len == 100
    assert loaded.model.num_blocks == 3 * 7


def test_a_small_cache_shortens_the_context(saved_llama: Path) -> None:
    """If the operator requested a length that does not fit, the model is refused."""
    assert load(saved_llama, kv_memory_bytes=2**16).context_length == 128
    assert "KV cache" in refusal(saved_llama, kv_memory_bytes=2**16, max_model_len=200)
    assert "blocks" in refusal(saved_llama, kv_memory_bytes=1000)


def test_a_share_of_the_memory_bounds_weights_and_cache(
    saved_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of 10 MB. What remains of the share beside the weights holds the cache, of
    which 15 % stay for computing; a smaller cache may be asked for, no larger one."""
    monkeypatch.setattr(memory, "total_cpu_bytes", lambda: 10_000_000)
    num_weight_bytes = sum(parameter.nbytes for parameter in make_model("llama").parameters())

    cache = paged(load(saved_llama, memory_share=0.1, block_size=16)).cache
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, size, float32
    room = int((1_000_000 - num_weight_bytes) * 0.85)
    assert cache.num_blocks == room // block_bytes

    given = load(saved_llama, memory_share=0.1, block_size=16, kv_memory_bytes=4 * block_bytes)
    assert given.model.num_blocks == 4
    sentence = refusal(saved_llama, memory_share=0.1, kv_memory_bytes=10**6)
    assert "memory_share 0.1 of the 0.00931 GiB of cpu is 0.000931 GiB" in sentence


def test_a_share_that_holds_too_little_is_refused_with_one_that_fits(
    saved_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights over the share are refused before they are read; else a cache of 256 tokens, or of
    the operator's longest sequence, must fit. The share that the sentence names does fit."""
    monkeypatch.setattr(memory, "total_cpu_bytes", lambda: 10_000_000)
    monkeypatch.setattr(loader, "load_decoder", None)
    assert "the weights alone need" in refusal(saved_llama, memory_share=0.001)
    monkeypatch.undo()
    monkeypatch.setattr(memory, "total_cpu_bytes", lambda: 10_000_000)
    asked: list[dict[str, Any]] = [{}, {"max_model_len": 400}]
    for options in asked:
        num_tokens = options.get("max_model_len", 256)
        weights_alone = refusal(saved_llama, memory_share=0.001)
        share = float(weights_alone.split("a share of ")[1])
        sentence = refusal(saved_llama, memory_share=share, **options)
        assert "for the KV cache" in sentence
        fitting = float(sentence.split("a share of ")[1].split(" would fit")[0])
        loaded = load(saved_llama, memory_share=fitting, **options)
        assert loaded.model.num_blocks * loaded.model.block_size >= num_tokens
        refusal(saved_llama, memory_share=fitting - 0.002, **options)


def test_cudnn_attention_is_off(saved_llama: Path) -> None:
    """It would build a graph for each new length of a context."""
    torch.backends.cuda.enable_cudnn_sdp(True)

    load(saved_llama)

    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_options_out_of_range_are_refused(saved_llama: Path) -> None:
    """The sentence names the option."""
    assert "max_model_len" in refusal(saved_llama, max_model_len=513)
    assert "dtype" in refusal(saved_llama, dtype="int8")
    assert "device" in refusal(saved_llama, device="tpu")


def test_code_that_comes_with_a_model_is_never_run(llama: Path) -> None:
    """Neither the configuration's nor the tokenizer's."""
    canary = llama / "ran"
    (llama / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    edit_json(llama / "config.json", auto_map={"AutoConfig": "evil.Evil"}, model_type="evil")

    assert "auto_map" in refusal(llama)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("file", "changes", "word"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil"] * 2}}, "auto_map"),
        # transformers would fill the third layer with random numbers.
        ("config.json", {"num_hidden_layers": 3}, "missing"),
        ("config.json", {"is_causal": False}, "causal"),
        ("config.json", {"model_type": "no_such_model"}, "transformers"),
    ],
)
def test_what_cannot_be_served_is_refused(
    llama: Path, file: str, changes: dict[str, Any], word: str
) -> None:
    edit_json(llama / file, **changes)

    assert word in refusal(llama)


def test_a_missing_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such folder, and a Hub that cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    assert "no folder" in refusal(tmp_path / "nowhere")
    assert "no folder" in refusal("./nowhere")
    assert "Hub" in refusal("batchway-tests/no-such-model")


_DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize("text", [_DEEP, "[1]", "null", "\0", ""])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"],
)
def test_a_malformed_json_file_is_refused_by_name(llama: Path, name: str, text: str) -> None:
    """Nested too deeply, not an object, or damaged."""
    (llama / name).write_text(text)

    assert name in refusal(llama)


@pytest.mark.parametrize("text", [_DEEP, "[1]", "null", "\0", "{}"])
def test_a_malformed_tokenizer_is_refused(llama: Path, text: str) -> None:
    (llama / "tokenizer.json").write_text(text)

    assert "tokenizer" in refusal(llama)


@pytest.mark.parametrize("size", [-1, 0, 2**40, 2**70, "many", 1.5, [1], True])
@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"]
)
def test_an_impossible_size_is_refused_by_name(llama: Path, name: str, size: Any) -> None:
    """Before a decoder of that size is built."""
    edit_json(llama / "config.json", **{name: size})

    assert name in refusal(llama).replace(" size", "_size")


@pytest.mark.parametrize("size", [-1, 0, 2**40, 2**70])
@pytest.mark.parametrize(
    "name", ["num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"]
)
def test_inconsistent_sizes_are_refused(llama: Path, name: str, size: int) -> None:
    """A model without attention has 0 heads, but this one has attention."""
    edit_json(llama / "config.json", **{name: size})

    assert refusal(llama)


def header(header: bytes, num_bytes: int | None = None) -> bytes:
    """A file of weights with this header and this declared header length."""
    return struct.pack("<Q", len(header) if num_bytes is None else num_bytes) + header


_TENSOR = '{"x":{"dtype":"F32","shape":%s,"data_offsets":%s}}'
HEADERS = {
    "a length of exabytes": header(b"{}", 2**63),
    "a length beyond the file": header(b"{}", 10**8),
    "deep JSON": header(_DEEP.encode()),
    "a negative shape": header((_TENSOR % ("[-1]", "[0,4]")).encode()),
    "a shape beyond all numbers": header((_TENSOR % ("[4294967296,4294967296]", "[0,4]")).encode()),
    "a file that is cut off": b"",  # of the true one
    "data beyond the file": header((_TENSOR % ("[1099511627776]", "[0,4398046511104]")).encode()),
}


@pytest.mark.parametrize("name", HEADERS)
def test_weights_with_a_damaged_header_are_refused(llama: Path, name: str) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(HEADERS[name] or file.read_bytes()[:1000])

    assert "damaged" in refusal(llama)


def test_a_shape_that_only_the_model_itself_shows_is_told_by_its_tensor(tmp_path: Path) -> None:
    """Not in transformers' words about a setting that nobody made."""
    folder = save_tiny_model("gpt2", tmp_path)
    name = "transformer.h.1.mlp.c_fc.bias"
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: torch.zeros(7)}, folder / "model.safetensors", {"format": "pt"})

    sentence = refusal(folder)

    assert f"1 mismatched, for example {name} of the shape [7]" in sentence
    assert f"config.json makes it {list(weights[name].shape)}" in sentence
    assert "ignore_mismatched_sizes" not in sentence


def test_a_load_tells_its_stages(saved_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first one, before torch is imported; of the weights how many are read."""
    monkeypatch.setattr("workers.model.weights._TELL_EVERY_S", 0)
    lines: list[str] = []

    load_torch_model(EngineOptions(model_path=str(saved_llama), device="cpu"), lines.append)
    gc.unfreeze()

    stages = (
        f"checking the files of {saved_llama}",
        "importing torch and transformers",
        f"reading configuration and tokenizer of {saved_llama}",
        f"loading {saved_llama} as float32",
        "read 1 of 21 weights",
        "comparing a batch",
        "choosing this processor's fastest products",
        "preparing the memory of the KV cache",
        "KV cache of",
    )
    places = [[line.startswith(stage) for line in lines].index(True) for stage in stages]
    assert places == sorted(places)
    assert places[:2] == [0, 1]


@pytest.mark.parametrize("template", [b"\xff\xfe", b"x" * (2**20 + 1)])
def test_a_chat_template_that_is_no_text_or_too_long_is_refused(
    llama: Path, template: bytes
) -> None:
    (llama / "chat_template.jinja").write_bytes(template)

    assert "template" in refusal(llama)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"sliding_window": 8}, "window"),
    ],
)
def test_unsupported_attention_is_not_paged(
    llama: Path, changes: dict[str, Any], word: str
) -> None:
    """Chunked, or with a window that the layers do not declare; the reason is reported."""
    edit_json(llama / "config.json", **changes)
    lines: list[str] = []

    loaded = load(llama, lines)

    assert not sequential(loaded).shares_blocks
    [line] = [line for line in lines if line.startswith("served one sequence at a time: ")]
    assert word in line


class _ForgetfulAttention(ReferenceAttention):
    """A back end with a bug: it reads only the newest tokens of each sequence."""

    def prepare(self, spans: Seq[RowSpan], device: torch.device) -> Any:
        return super().prepare(
            [replace(s, slots=s.slots[-1:].repeat(len(s.slots))) for s in spans], device
        )


def test_a_model_that_paging_would_change_is_not_paged(
    saved_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the cause: here a back end reads the wrong slots."""
    monkeypatch.setattr("workers.model.backend.PackedAttention", _ForgetfulAttention)
    lines: list[str] = []

    load(saved_llama, lines, fused=False)

    assert any("other logits in a paged batch" in line for line in lines)


@pytest.mark.parametrize(
    "step",
    ["read_config", "end_token_ids", "load_decoder", "fix_rope", "paged_runner", "context_length"],
)
def test_whatever_a_family_raises_is_a_reason(
    step: str, saved_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any step of a load; lack of memory is no fault of the model and is raised as it is."""
    planted: list[Exception] = [AttributeError("planted\nfault"), MemoryError()]

    def fail(*_: Any, **__: Any) -> None:
        raise planted.pop(0)

    monkeypatch.setattr(f"workers.model.loader.{step}", fail)

    assert refusal(saved_llama).endswith("cannot be loaded: planted")
    with pytest.raises(MemoryError):
        load(saved_llama)
