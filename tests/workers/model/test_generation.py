"""What a model's files say about generating: sampling settings and end tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.model_cards import GenerationDefaults
from tests.tiny_models import EOS_ID, VOCAB_SIZE, edit_json
from tests.workers.model.loading import load, refusal
from workers.engine.interface import ModelRefused
from workers.model.checkpoint import read_config
from workers.model.files import ModelFiles
from workers.model.generation import end_token_ids, sampling_defaults
from workers.model.tokenizer import read_tokenizer

HASH_ID = 6  # of the token "#"


@pytest.fixture
def llama(llama: Path) -> Path:
    """Without a generation_config.json."""
    (llama / "generation_config.json").unlink(missing_ok=True)
    return llama


def write(folder: Path, name: str = "generation_config.json", **settings: Any) -> ModelFiles:
    (folder / name).write_text(json.dumps(settings))
    return ModelFiles(str(folder), "main")


def defaults_of(folder: Path, **settings: Any) -> dict[str, Any]:
    """The settings that hold, by name."""
    found = sampling_defaults(write(folder, **settings), VOCAB_SIZE)
    return {
        name: value
        for name in found.__struct_fields__
        if (value := getattr(found, name)) not in (None, ())
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 0, "repetition_penalty": 1.05},
        {"temperature": 0.0001},
        # What transformers 4 took for its own defaults, and left out.
        {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0},
        {"min_p": 0.05},
        {"min_p": 0.0, "top_p": 1},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"suppress_tokens": (5, 7)},
    ],
)
@pytest.mark.parametrize("do_sample", [None, True, False])
def test_settings_are_those_of_the_raw_file(
    settings: dict[str, Any], do_sample: bool | None, llama: Path
) -> None:
    """Whatever `do_sample` says, as in vLLM."""
    assert defaults_of(llama, do_sample=do_sample, **settings) == settings


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 0},
        {"top_k": -1},
        {"temperature": None, "top_k": None, "top_p": None, "min_p": None},
        {"suppress_tokens": None, "repetition_penalty": None},
        {"suppress_tokens": []},
        {"max_new_tokens": 5, "begin_suppress_tokens": [3], "transformers_version": "4.51.0"},
    ],
)
def test_settings_that_are_off_or_not_there_say_nothing(
    settings: dict[str, Any], llama: Path
) -> None:
    assert sampling_defaults(write(llama, **settings), VOCAB_SIZE) == GenerationDefaults()


_WRONG = {
    "temperature": [-0.1, 101, "0.6", True, [0.6], float("nan"), float("inf")],
    "top_k": [-2, 2**31, 2.5, "20", True, [20]],
    "top_p": [0, -0.5, 1.1, "0.9", False, float("nan")],
    "min_p": [-0.1, 1.5, "0.1", {}],
    "repetition_penalty": [0, -1, "1.1", True, 1000],
    "presence_penalty": [3, "1"],
    "frequency_penalty": [-3, "1"],
    "suppress_tokens": [[-1], [VOCAB_SIZE], ["5"], [1.5], 5, "5", list(range(1025)), [2**40]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in _WRONG.items() for value in values]
)
def test_an_impossible_setting_is_refused_by_file_and_name(
    name: str, value: Any, llama: Path
) -> None:
    """And not where the settings are ignored."""
    files = write(llama, **{name: value})

    with pytest.raises(ModelRefused) as caught:
        sampling_defaults(files, VOCAB_SIZE)

    sentence = str(caught.value)
    assert "generation_config.json" in sentence
    assert name in sentence
    assert "--generation-config none" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.6, "top_k": 5, "do_sample": True}, {"temperature": 0.6, "top_k": 5}),
        ({"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}, {}),
        ({"top_p": 0.9, "temperature": 1.0}, {"top_p": 0.9}),
        ({"suppress_tokens": [7]}, {"suppress_tokens": (7,)}),
        ({"text_config": {"temperature": 0.3, "top_p": 0.8}, "top_p": 0.9},
         {"temperature": 0.3, "top_p": 0.9}),
    ],
)  # fmt: skip
def test_without_the_file_an_old_configuration_tells(
    settings: dict[str, Any], expected: dict[str, Any], llama: Path
) -> None:
    """Where transformers wrote its own defaults, they say nothing of the model."""
    edit_json(llama / "config.json", **settings)
    files = ModelFiles(str(llama), "main")

    found = sampling_defaults(files, VOCAB_SIZE)

    assert found == GenerationDefaults(**expected)
    write(llama)
    assert sampling_defaults(files, VOCAB_SIZE) == GenerationDefaults()


def test_an_impossible_setting_of_an_old_configuration_names_that_file(llama: Path) -> None:
    edit_json(llama / "config.json", temperature="hot")

    with pytest.raises(ModelRefused, match=r"config\.json of .* temperature"):
        sampling_defaults(ModelFiles(str(llama), "main"), VOCAB_SIZE)


def test_a_loaded_model_tells_its_settings_unless_they_are_ignored(llama: Path) -> None:
    """Its end tokens count in both cases."""
    write(llama, temperature=0.6, top_k=20, eos_token_id=[EOS_ID, 9])

    for choice, expected in (
        ("auto", GenerationDefaults(temperature=0.6, top_k=20)),
        ("none", GenerationDefaults()),
    ):
        loaded = load(llama, generation_config=choice)
        assert loaded.generation == expected
        assert loaded.eos_token_ids == (EOS_ID, 9)
    write(llama, temperature="hot")
    load(llama, generation_config="none")
    assert "temperature" in refusal(llama)


# --- end tokens -------------------------------------------------------------------------------


def ends_of(folder: Path) -> tuple[int, ...]:
    path = str(folder)
    return end_token_ids(ModelFiles(path, "main"), read_config(path), read_tokenizer(path))


def added(content: str) -> dict[str, Any]:
    """An AddedToken as files hold it."""
    flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"__type": "AddedToken", "content": content, **dict.fromkeys(flags, False)}


@pytest.mark.parametrize("token", ["#", added("#")])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_tokenizers_end_token_ends_answers_too(llama: Path, name: str, token: Any) -> None:
    """Fine-tunes often name it there alone: as text or as an AddedToken, in either file, of which
    transformers 5 often reads the first alone."""
    config = json.loads((llama / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (llama / "tokenizer_config.json").write_text(json.dumps(config))
    if name == "special_tokens_map.json":
        write(llama, name, eos_token=token)
    else:
        edit_json(llama / name, eos_token=token)

    assert ends_of(llama) == (EOS_ID, HASH_ID)


def test_end_tokens_of_all_files_are_joined(llama: Path) -> None:
    """config.json, generation_config.json, one id or several, and the tokenizer's two files."""
    edit_json(llama / "config.json", eos_token_id=[20, 21])
    edit_json(llama / "tokenizer_config.json", eos_token="#")
    for named in (22, [22], [22, 20]):
        write(llama, eos_token_id=named)
        assert ends_of(llama) == (HASH_ID, 20, 21, 22)
    write(llama, "special_tokens_map.json", eos_token="<unk>")
    assert ends_of(llama) == (3, HASH_ID, 20, 21, 22)


def test_an_end_token_that_the_model_cannot_give_is_left_out(llama: Path) -> None:
    """Added to the tokenizer alone, or beyond the vocabulary; nor does null count."""
    write(llama, eos_token_id=[EOS_ID, VOCAB_SIZE, 2**31 - 1, None])
    write(llama, "special_tokens_map.json", eos_token=None)

    assert ends_of(llama) == (EOS_ID,)


@pytest.mark.parametrize("token_id", [True, -1, 2**70, "</s>", [[1]], 1.5, list(range(2000))])
@pytest.mark.parametrize("ignores", [True, False])
def test_an_impossible_end_token_is_refused(llama: Path, token_id: Any, ignores: bool) -> None:
    """Also where the sampling settings are ignored."""
    write(llama, eos_token_id=token_id)

    assert "end token" in refusal(llama, generation_config="none" if ignores else "auto")
