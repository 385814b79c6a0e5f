"""A GGUF file becomes a folder with what transformers reads in it, or is refused in a sentence."""

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.gguf_files import CHATML, write_gguf
from tests.tiny_models import make_config
from tests.workers.model.driver import generate_greedily, make_prompts, make_sequence, run_to_end
from tests.workers.model.loading import load
from workers.engine.interface import ModelRefused
from workers.model.gguf_compat import gguf_architectures
from workers.model.gguf_folder import write_folder
from workers.model.transformers_compat import ROPE_INIT_FUNCTIONS

# What transformers takes from no key of the file: as all published models of the family have it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "phi3": {},
    "gemma3": {},
    "starcoder2": {},
    "stablelm": {},
    "nemotron": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {"tie_word_embeddings": True},
    "gpt2": {"n_positions": 1024},
}
_KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def folder_of(file: Path, dtype: torch.dtype = torch.float32) -> Path:
    folder = file.with_suffix("")
    write_folder(file, folder, dtype, file.name)
    return folder


def refusal(file: Path) -> str:
    """The sentence; nothing is written."""
    with pytest.raises(ModelRefused) as caught:
        folder_of(file)
    sentence = str(caught.value)
    assert file.name in sentence
    assert 0 < len(sentence) < 600
    assert "\n" not in sentence
    assert not file.with_suffix("").exists()
    return sentence


def read_whole(file: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)


def are_equal(first: Any, second: Any) -> bool:
    weights, others = first.state_dict(), second.state_dict()
    same = (torch.equal(weights[name], others[name]) for name in weights)
    return weights.keys() == others.keys() and all(same)


# --- what is in it ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_has_the_weights_of_the_file(family: str, tmp_path: Path) -> None:
    """Those that transformers reads, and those that the file was written of; served, they yield the
    tokens of generate."""
    file = tmp_path / "tiny.gguf"
    original = write_gguf(file, family, changes=FAMILIES[family])

    folder = folder_of(file)

    made: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert are_equal(made, read_whole(file))
    for name, weight in original.state_dict().items():
        torch.testing.assert_close(made.state_dict()[name], weight, rtol=0, atol=1e-6)
    prompts = make_prompts([5, 20], made.config.vocab_size)
    sequences = [make_sequence(prompt, max_tokens=8) for prompt in prompts]
    outputs = run_to_end(load(folder).model, sequences, 16)
    assert outputs == [generate_greedily(made, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.each_value
def test_a_folder_has_what_its_type_holds_of_quantised_weights(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """float32 holds every one; a half type rounds as transformers does."""
    file = tmp_path / f"tiny-{kind}.gguf"
    write_gguf(file, kind=kind)

    folder = folder_of(file, dtype)

    made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert made.dtype == dtype
    assert are_equal(made, read_whole(file, dtype))
    assert are_equal(made, read_whole(file).to(dtype))


def test_tokenizer_and_template_are_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)

    tokenizer: Any = AutoTokenizer.from_pretrained(folder_of(file))

    other: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    chat = [{"role": "user", "content": "the 5 thieves\n"}]
    for text in ("the thick  brush", "<|im_start|>user\nthat<|im_end|>", "ünï 🙂"):
        assert tokenizer(text).input_ids == other(text).input_ids
    assert tokenizer.chat_template == CHATML
    assert tokenizer.apply_chat_template(chat) == other.apply_chat_template(chat)
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [({}, {1}), ({"eot": 7}, {1, 7}), ({"eot": 7, "eom": 9}, {1, 7, 9}), ({"eot": 1}, {1})],
)
def test_ends_of_a_turn_and_of_a_message_end_an_answer(
    ends: dict[str, int], expected: set[int], tmp_path: Path
) -> None:
    """transformers reads the end of a text alone, with which chats of Gemma do not end."""
    file = tmp_path / "tiny.gguf"
    named: dict[str, Any] = {f"tokenizer__ggml__{kind}_token_id": id_ for kind, id_ in ends.items()}
    write_gguf(file, **named)

    loaded = load(folder_of(file))

    assert set(loaded.eos_token_ids) == expected


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_s_rotary_scaling_is_kept(factor: float, tmp_path: Path) -> None:
    """llama.cpp writes a divisor of each frequency, which transformers leaves out."""
    parameters = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaled = make_config("llama", rope_parameters=parameters, max_position_embeddings=2**17)
    file = tmp_path / "tiny.gguf"
    tensors = {"rope_freqs.weight": divisors_of(scaled)}
    write_gguf(file, tensors=tensors, changes={"max_position_embeddings": 2**17})

    made = AutoConfig.from_pretrained(folder_of(file))

    assert made.rope_parameters == pytest.approx(parameters)


def divisors_of(config: Any) -> torch.Tensor:
    plain = 10_000.0 ** -torch.linspace(0, 1, 9)[:-1]
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert not torch.allclose(plain, scaled)
    return plain / scaled


# --- refusals ---------------------------------------------------------------------------------


def test_another_architecture_is_refused_with_the_list_of_those_read(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, general__architecture="grok")  # no model of that name is read

    sentence = refusal(file)

    assert "'grok'" in sentence
    assert ", ".join(gguf_architectures()) in sentence


def test_the_architectures_have_llama_cpp_s_names() -> None:
    """Decoders alone: T5 is none. A file of Mistral says llama."""
    known = set(gguf_architectures())
    assert {"llama", "qwen2moe", "qwen3", "gemma3", "phi3", "gpt2", "lfm2", "qwen35"} <= known
    assert not known & {"general", "tokenizer", "t5", "umt5", "mistral", "deci", "qwen2_moe"}


_OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "yarn": ({"llama__rope__scaling__type": "yarn"}, "scales its rotary embedding"),
    "long rope": (
        {"tensors": {"rope_factors_long.weight": torch.ones(8)}},
        "scales its rotary embedding",
    ),
    "divisors": ({"tensors": {"rope_freqs.weight": torch.full((8,), 3.0)}}, "Llama 3's"),
    "part": ({"split__count": 3}, "several parts"),
    "no norm": ({"without": ["blk.1.attn_norm.weight"]}, "1 weights are missing or misshapen"),
    "heads": ({"llama__attention__head_count_kv": 4}, "weights are missing or misshapen"),
    "layers": ({"llama__block_count": 3}, "weights are missing or misshapen"),
    "tokenizer": ({"tokenizer__ggml__model": "rwkv"}, "tokenizer"),
}


@pytest.mark.parametrize("case", _OTHERS)
def test_what_cannot_be_read_whole_is_refused(case: str, tmp_path: Path) -> None:
    changes, words = _OTHERS[case]
    file = tmp_path / "tiny.gguf"
    write_gguf(file, **changes)

    assert words in refusal(file)


@pytest.mark.parametrize("contents", [b"", b"GGUF", b"GGML" + bytes(100), b"PK\3\4 no model"])
def test_another_file_is_refused(contents: bytes, tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    file.write_bytes(contents)

    assert "damaged, or no GGUF file" in refusal(file)


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "tiny.gguf", tmp_path / "cut.gguf"
    write_gguf(whole)
    contents = whole.read_bytes()
    lengths = [*range(0, 8000, 250), *random.Random(0).sample(range(len(contents)), 20)]
    for length in (*lengths, len(contents) - 1):
        cut.write_bytes(contents[:length])

        assert "damaged, or no GGUF file" in refusal(cut)


def test_a_damaged_header_is_refused_or_read(tmp_path: Path) -> None:
    """Whatever byte of it is another one, there is a folder, or a sentence."""
    whole, damaged = tmp_path / "tiny.gguf", tmp_path / "damaged.gguf"
    write_gguf(whole)
    contents = whole.read_bytes()
    draw, sentences = random.Random(0), list[str]()
    for number in range(60):
        changed = bytearray(contents)
        changed[draw.randrange(4 if number % 2 else 8000)] ^= 1 << draw.randrange(8)
        damaged.write_bytes(changed)
        try:
            write_folder(damaged, tmp_path / f"out-{number}", torch.float32, damaged.name)
        except ModelRefused as exc:
            sentences.append(str(exc))
    assert len(sentences) >= 30
    assert not [sentence for sentence in sentences if "\n" in sentence or len(sentence) > 600]


def test_a_model_beyond_the_disk_and_the_memory_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    """The sentence says what it takes and what is free. The file has a hole in place of weights."""
    file = tmp_path / "huge.gguf"
    write_gguf(file, without=["output.weight"])
    contents = file.read_bytes()
    # Its embedding's table entry: the number of dimensions, these, type and offset follow the name.
    name = b"token_embd.weight"
    at = contents.index(name) + len(name)
    sizes = struct.pack("<IQQI", 2, 64, 2**36, GGMLQuantizationType.Q4_0)
    file.write_bytes(contents[:at] + sizes + contents[at + len(sizes) :])
    with file.open("r+b") as opened:
        opened.truncate(2**43)

    sentence = refusal(file)

    assert "takes 16384.1 GiB on the disk as float32" in sentence
    assert "are free" in sentence
