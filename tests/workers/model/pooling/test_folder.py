"""What a folder says of its vectors, and what is refused with one sentence."""

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

from contract.jobs import SamplingParams
from infra.preconditions import UsageError, check_model
from tests.tiny_encoders import save_base, save_classifier, save_embedder, save_tokenizer
from tests.tiny_models import edit_json
from tests.workers.model.loading import FakeCard, load, refusal, use_card
from workers.engine.interface import Chunk, RowFailed, Vector
from workers.engine.sequence import Sequence
from workers.model.loader import LoadedModel
from workers.model.pooling.encoders import FlatEncoder, Text
from workers.model.pooling.folder import read_folder
from workers.model.pooling.runner import PoolingRunner


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder("bert", tmp_path_factory.mktemp("bert"), num_dense=1)


@pytest.fixture
def embedder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for file in saved.rglob("*"):
        if file.is_file():
            copy = tmp_path / file.relative_to(saved)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return tmp_path


def edit_modules(folder: Path, **changes: str) -> None:
    """Changes the type of modules, by the last part of its name."""
    file = folder / "modules.json"
    modules = json.loads(file.read_text())
    for module in modules:
        module["type"] = changes.get(module["type"].rpartition(".")[2], module["type"])
    file.write_text(json.dumps(modules))


def sequence_of(token_ids: list[int], **fields: Any) -> Chunk:
    params = SamplingParams(max_tokens=0, seed=0)
    sequence = Sequence("job", 1, 0, "t", "lane", token_ids, len(token_ids), params, **fields)
    return Chunk(sequence, 0, len(token_ids), samples=True)


def vector_of(loaded: LoadedModel, **fields: Any) -> torch.Tensor:
    [row] = loaded.model.run([sequence_of([1, 70, 71, 72, 2], **fields)])
    assert isinstance(row, Vector)
    return torch.frombuffer(bytearray(row.data), dtype=torch.float32)


def test_the_folder_s_card(embedder: Path) -> None:
    """Prompts without text are none; passages are documents; dimensions as declared."""
    edit_json(
        embedder / "config_sentence_transformers.json",
        prompts={"query": "q: ", "passage": "p: ", "document": "", "web": "w: "},
        default_prompt_name="web",
        truncate_dim=8,
    )
    edit_json(embedder / "config.json", matryoshka_dimensions=[4, 16, 10_000])

    card = load(embedder).pooling

    assert card is not None
    assert (card.kind, card.num_outputs, card.activation) == ("embedding", 24, "none")
    assert card.prompts == {"query": "q: ", "passage": "p: ", "document": "p: ", "web": "w: "}
    assert card.default_prompt == "web"
    assert card.dimensions == (4, 8, 16)
    assert not card.renders_pairs


def test_a_shorter_vector_is_the_beginning_normalised_again(embedder: Path) -> None:
    loaded = load(embedder)

    whole, short = vector_of(loaded), vector_of(loaded, num_dimensions=8)

    assert torch.allclose(short, torch.nn.functional.normalize(whole[:8], dim=0))
    assert len(whole) == 24


def test_old_folders_say_the_same(saved: Path, embedder: Path) -> None:
    """Before 6.0: one switch for each mode, other names of classes, the length in a file of its
    own, the weights perhaps in a folder of theirs."""
    expected = vector_of(load(saved))
    package = "sentence_transformers.models"
    edit_modules(
        embedder, **{name: f"{package}.{name}" for name in ("Transformer", "Pooling", "Dense")}
    )
    old = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (embedder / "1_Pooling" / "config.json").write_text(json.dumps(old))
    settings = {"max_seq_length": 50, "do_lower_case": True}
    (embedder / "sentence_bert_config.json").write_text(json.dumps(settings))

    loaded = load(embedder)

    assert torch.equal(vector_of(loaded), expected)
    assert loaded.context_length == 50
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    assert tokenizer.encode("ÄBC").ids == tokenizer.encode("äbc").ids


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "xlnet"])
def test_settings_named_after_a_model_s_type_are_read(model_type: str, embedder: Path) -> None:
    """sentence-transformers looks for seven names."""
    settings = {"max_seq_length": 50, "do_lower_case": True}
    (embedder / "sentence_bert_config.json").unlink()
    (embedder / f"sentence_{model_type}_config.json").write_text(json.dumps(settings))

    found = read_folder(str(embedder), "main")

    assert found is not None
    assert (found.max_tokens, found.lowercases) == (50, True)


def test_gateways_see_whole_texts(saved: Path) -> None:
    """The tokenizer's own truncation and padding would hide a text that is too long."""
    tokenizer = Tokenizer.from_str(load(saved).tokenizer.tokenizer_json)

    assert len(tokenizer.encode("x" * 1000).ids) == 1002
    assert len(tokenizer.encode("x").ids) == 3


def test_the_context_leaves_out_positions_before_the_first(tmp_path: Path) -> None:
    """RoBERTa's position table begins with rows that no text uses."""
    folder = save_embedder("xlm_roberta", tmp_path)
    edit_json(folder / "tokenizer_config.json", model_max_length=10_000)

    assert load(folder).context_length == 510
    assert load(folder, max_model_len=40).context_length == 40
    assert "max_model_len" in refusal(folder, max_model_len=511)


def test_the_last_position_can_be_used(tmp_path: Path) -> None:
    """A text as long as the context."""
    folder = save_embedder("xlm_roberta", tmp_path)
    edit_json(folder / "tokenizer_config.json", model_max_length=10_000)

    [row] = load(folder).model.run([sequence_of([70] * 510)])

    assert isinstance(row, Vector)


def test_labels_and_several_labels_at_once(tmp_path: Path) -> None:
    """A model that may find several has a sigmoid for each."""
    folder = save_classifier(
        "bert",
        tmp_path,
        2,
        id2label={0: "good", 1: "bad"},
        label2id={"good": 0, "bad": 1},
        problem_type="multi_label_classification",
    )

    card = load(folder).pooling

    assert card is not None
    assert (card.labels, card.activation) == (("good", "bad"), "sigmoid")


def test_a_vector_that_is_not_finite_fails_its_own_row(saved: Path) -> None:
    loaded = load(saved)
    runner = loaded.model
    assert isinstance(runner, PoolingRunner)
    assert isinstance(runner.encoder, FlatEncoder)
    embeddings = runner.encoder._model.get_input_embeddings()
    embeddings.weight[99] = float("nan")

    rows = runner.run([sequence_of([1, 99, 2]), sequence_of([1, 98, 2])])

    assert isinstance(rows[0], RowFailed)
    assert isinstance(rows[1], Vector)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"Normalize": "evil.Normalize"}, "code that comes with the model"),
        ({"Normalize": "sentence_transformers.models.WordWeights"}, "WordWeights"),
        ({"Transformer": "sentence_transformers.models.CLIPModel"}, "Transformer"),
        ({"Pooling": "sentence_transformers.models.Normalize"}, "no Pooling"),
    ],
)
def test_modules_that_are_not_computed_are_refused(
    changes: dict[str, str], word: str, embedder: Path
) -> None:
    edit_modules(embedder, **changes)

    assert word in refusal(embedder)


@pytest.mark.parametrize(
    ("file", "changes", "word"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "median"),
        ("1_Pooling/config.json", {"include_prompt": False}, "prompt"),
        ("2_Dense/config.json", {"activation_function": "evil.Run"}, "evil.Run"),
        ("2_Dense/config.json", {"out_features": 7}, "Dense"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
        ("config.json", {"auto_map": {"AutoModel": "evil.Evil"}}, "auto_map"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    file: str, changes: dict[str, Any], word: str, embedder: Path
) -> None:
    edit_json(embedder / file, **changes)

    assert word in refusal(embedder)


def test_paths_outside_the_folder_are_refused(embedder: Path) -> None:
    file = embedder / "modules.json"
    file.write_text(file.read_text().replace("2_Dense", "../2_Dense"))

    assert "outside" in refusal(embedder)


def test_a_transformer_in_a_sub_folder_is_refused(embedder: Path) -> None:
    """By the loader and by the commands, whether or not the folder itself has a configuration."""
    file = embedder / "modules.json"
    file.write_text(file.read_text().replace('"path": ""', '"path": "0_Transformer"'))
    assert "sub-folder" in refusal(embedder)

    (embedder / "config.json").unlink()
    assert "sub-folder" in refusal(embedder)
    with pytest.raises(UsageError, match="sub-folder"):
        check_model(str(embedder), "own")


def test_pickled_dense_weights_are_refused(embedder: Path) -> None:
    """Reading them could run code."""
    (embedder / "2_Dense" / "model.safetensors").unlink()

    assert "pickled" in refusal(embedder)


def test_incomplete_weights_are_refused(embedder: Path) -> None:
    """transformers would fill in random numbers."""
    save_file({"x": torch.zeros(1)}, embedder / "model.safetensors", {"format": "pt"})

    assert "missing" in refusal(embedder)


def test_options_for_generating_models_are_refused(saved: Path) -> None:
    assert "quantization" in refusal(saved, quantization="int8")


MODULES = ("memory", "pooling.loading")


def test_weights_over_the_share_of_memory_are_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the headers of a folder's files, before they are read; else by what was read."""
    load(saved, memory_share=0.5)
    assert "the weights alone need" in refusal(saved, memory_share=1e-9)

    monkeypatch.setattr("workers.model.loader.least_weight_bytes", lambda *_, **__: 0)
    assert "GiB for weights" in refusal(saved, memory_share=1e-9)


def test_a_gpu_s_largest_step_counts_to_the_share_of_memory(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a full step of the longest texts, and is run as the model is loaded."""
    seen: list[list[int]] = []
    encode = FlatEncoder.encode

    def noted(encoder: FlatEncoder, texts: Seq[Text]) -> torch.Tensor:
        seen.append([len(text.token_ids) for text in texts])
        return encode(encoder, texts)

    monkeypatch.setattr(FlatEncoder, "encode", noted)
    use_card(FakeCard(1000), monkeypatch, *MODULES)
    load(saved, memory_share=0.5, max_num_batched_tokens=900)
    assert [400, 400] in seen

    use_card(FakeCard(2**50), monkeypatch, *MODULES)
    assert "for computing" in refusal(saved, memory_share=0.5)


def test_a_step_that_a_gpu_cannot_hold_is_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than failing once such texts come."""
    use_card(FakeCard(None), monkeypatch, *MODULES)

    assert "does not hold a step of 2 text(s) of 400 tokens" in refusal(saved)


def test_an_encoder_that_does_not_say_how_it_pools_is_refused(tmp_path: Path) -> None:
    folder = save_base("bert", tmp_path, transformers.AutoModel)

    assert refusal(folder)


def test_a_chat_template_of_an_embedding_model_is_refused(embedder: Path) -> None:
    """sentence-transformers would render texts with it; gateways do not."""
    save_tokenizer(embedder, "{{ messages }}", has_types=True)
    edit_json(embedder / "sentence_bert_config.json", modality_config={"text": {}, "message": {}})

    assert "template" in refusal(embedder)
