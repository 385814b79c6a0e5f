"""Vectors and scores are those of sentence-transformers on the same weights, and a text's are the
same alone and among others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import pipeline

from tests.tiny_encoders import (
    ENCODERS,
    bi_encoder,
    cross_encoder,
    save_classifier,
    save_embedder,
    save_reranker,
)
from tests.workers.model import loading
from workers.model.loader import LoadedModel
from workers.model.pooling.encoders import FlatEncoder, PaddedEncoder, Text
from workers.model.pooling.folder import MODES
from workers.model.pooling.runner import PoolingRunner

LEAST_COSINE = 0.9999
# Of float32 arithmetic in another order.
ALONE_TOLERANCE = 2e-6
SCORE_TOLERANCE = 1e-5
PADDED = {"mpnet", "deberta_v2"}  # their attention is their own
TEXTS = [
    "a",
    "the quick brown fox",
    "b" * 60,
    "Hello, world! " * 5,
    "zz",
    "abcdef",
    "abcdeg",
    "",
    "ein Satz mit Umlauten: äöü",
]
PAIRS = [
    ("a", "the quick brown fox"),
    ("b" * 30, "c"),
    ("what is it?", "Hello, world! " * 5),
    ("zz", "abcdef"),
    ("zz", "abcdeg"),
]


def load(folder: Path, **options: Any) -> tuple[LoadedModel, PoolingRunner]:
    loaded = loading.load(folder, **options)
    assert isinstance(loaded.model, PoolingRunner)
    assert loaded.pooling is not None
    assert loaded.tokens_per_s > 0
    return loaded, loaded.model


def texts_of(loaded: LoadedModel, texts: list[str]) -> list[Text]:
    """As a gateway tokenises them."""
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    return [Text(tokenizer.encode(text).ids) for text in texts]


def pairs_of(loaded: LoadedModel, pairs: list[tuple[str, str]]) -> list[Text]:
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    found = [tokenizer.encode(first, second) for first, second in pairs]
    return [Text(pair.ids, pair.type_ids.index(1)) for pair in found]


def check_alone(runner: PoolingRunner, texts: list[Text]) -> torch.Tensor:
    """What the texts give together, which is what each gives alone."""
    together = runner.compute(texts)
    alone = torch.cat([runner.compute([text]) for text in texts])
    assert float((together - alone).abs().max()) <= ALONE_TOLERANCE
    return together


def check_cosines(found: torch.Tensor, folder: Path, texts: list[str], **options: Any) -> None:
    expected = bi_encoder(folder).encode(texts, convert_to_tensor=True, **options)
    assert found.shape == expected.shape
    assert float(torch.cosine_similarity(found, expected).min()) >= LEAST_COSINE
    # Directions alone would also agree if a model's vectors were all alike.
    assert float(torch.cosine_similarity(found[1], found[2], dim=0)) < 0.999


@pytest.mark.parametrize("family", ENCODERS)
def test_a_family_s_embeddings(family: str, tmp_path: Path) -> None:
    """Mean, a Dense layer and normalisation, from the modules that sentence-transformers saved."""
    folder = save_embedder(family, tmp_path, num_dense=1)
    loaded, runner = load(folder)

    found = check_alone(runner, texts_of(loaded, TEXTS))

    check_cosines(found, folder, TEXTS)
    assert isinstance(runner.encoder, PaddedEncoder if family in PADDED else FlatEncoder)
    assert torch.allclose(found.norm(dim=1), torch.ones(len(TEXTS)))


@pytest.mark.parametrize("mode", [*MODES, ("cls", "mean")], ids=str)
def test_a_pooling_mode(mode: str | tuple[str, ...], tmp_path: Path) -> None:
    """Without normalisation, so that lengths count too."""
    folder = save_embedder("bert", tmp_path, mode=mode, is_normalized=False)
    loaded, runner = load(folder)

    found = check_alone(runner, texts_of(loaded, TEXTS))

    check_cosines(found, folder, TEXTS)
    expected = bi_encoder(folder).encode(TEXTS)
    np.testing.assert_allclose(found.numpy(), expected, atol=SCORE_TOLERANCE)


def test_qwen3_embedding(tmp_path: Path) -> None:
    """A causal decoder whose last token is the vector, with an instruction for queries."""
    prompts = {"query": "Instruct: find it\nQuery:", "document": ""}
    folder = save_embedder("qwen3", tmp_path, mode="lasttoken", prompts=prompts)
    loaded, runner = load(folder)
    assert loaded.pooling is not None
    assert loaded.pooling.prompts == {"query": prompts["query"]}

    texts = [loaded.pooling.prompts["query"] + text for text in TEXTS]

    check_cosines(check_alone(runner, texts_of(loaded, texts)), folder, TEXTS, prompt_name="query")


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.each_value
def test_a_family_s_classifier(family: str, num_labels: int, tmp_path: Path) -> None:
    """Plain `*ForSequenceClassification` folders, through the model's own head, on pairs."""
    folder = save_classifier(family, tmp_path, num_labels)
    loaded, runner = load(folder)

    found = check_alone(runner, pairs_of(loaded, PAIRS))

    activation = torch.nn.Sigmoid() if num_labels == 1 else torch.nn.Softmax(dim=1)
    expected = cross_encoder(folder).predict(PAIRS, activation_fn=activation)
    np.testing.assert_allclose(found.numpy(), expected.reshape(found.shape), atol=SCORE_TOLERANCE)
    assert loaded.pooling is not None
    assert loaded.pooling.kind == ("reranker" if num_labels == 1 else "classifier")
    assert len(loaded.pooling.labels) == num_labels


@pytest.mark.parametrize(
    ("num_labels", "problem_type"),
    [
        (1, None),
        (1, "regression"),
        (1, "multi_label_classification"),
        (2, None),
        (2, "regression"),
        (2, "single_label_classification"),
        (2, "multi_label_classification"),
    ],
)
def test_a_plain_classifier_s_scores_of_single_texts(
    num_labels: int, problem_type: str | None, tmp_path: Path
) -> None:
    """Those of transformers' pipeline: a regression's score is no probability."""
    folder = save_classifier("bert", tmp_path, num_labels, problem_type=problem_type)
    loaded, runner = load(folder)
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    classify: Any = pipeline("text-classification", str(folder), device="cpu", top_k=None)

    found = runner.compute([Text(tokenizer.encode(text).ids) for text in TEXTS])

    assert loaded.pooling is not None
    for row, expected in zip(found.tolist(), classify(TEXTS), strict=True):
        scores = {one["label"]: one["score"] for one in expected}
        named = dict(zip(loaded.pooling.labels, row, strict=True))
        assert named == pytest.approx(scores, abs=SCORE_TOLERANCE)


def test_a_classifier_without_a_padding_token(tmp_path: Path) -> None:
    """transformers computes it alone only, as it cannot tell where a text ends."""
    folder = save_classifier("qwen3", tmp_path, 3, pad_token_id=None)
    loaded, runner = load(folder)

    check_alone(runner, texts_of(loaded, TEXTS))


def test_a_cross_encoder_that_was_saved_with_its_activation(tmp_path: Path) -> None:
    """Its modules.json lists a Transformer alone."""
    plain = save_classifier("bert", tmp_path / "plain", 1)
    reference = cross_encoder(plain, activation_fn=torch.nn.Identity())
    reference.save(str(tmp_path / "saved"), create_model_card=False)
    loaded, runner = load(tmp_path / "saved")

    found = check_alone(runner, pairs_of(loaded, PAIRS))

    np.testing.assert_allclose(found[:, 0].numpy(), reference.predict(PAIRS), atol=SCORE_TOLERANCE)
    assert loaded.pooling is not None
    assert loaded.pooling.activation == "none"


def test_a_cross_encoder_with_several_labels(tmp_path: Path) -> None:
    """It gives each label's probability, also without an activation of its own, and needs pairs."""
    plain = save_classifier("bert", tmp_path / "plain", 3, type_vocab_size=2)
    reference = cross_encoder(plain, activation_fn=torch.nn.Identity())
    reference.save(str(tmp_path / "saved"), create_model_card=False)
    loaded, runner = load(tmp_path / "saved")

    found = check_alone(runner, pairs_of(loaded, PAIRS))

    expected = reference.predict(PAIRS, activation_fn=torch.nn.Softmax(dim=1))
    np.testing.assert_allclose(found.numpy(), expected, atol=SCORE_TOLERANCE)
    card = loaded.pooling
    assert card is not None
    assert (card.kind, card.activation, card.needs_pairs) == ("classifier", "softmax", True)


def test_qwen3_reranker(tmp_path: Path) -> None:
    """The log-odds of two tokens, after a template of an instruction, a query and a document."""
    folder = save_reranker(tmp_path)
    loaded, runner = load(folder)
    reference = cross_encoder(folder)
    card, tokenizer = loaded.pooling, Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    assert card is not None
    assert (card.kind, card.renders_pairs, card.default_prompt) == ("reranker", True, "web")
    rendered = [
        reference.tokenizer.apply_chat_template(
            [
                {"role": "system", "content": card.prompts["web"]},
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ],
            tokenize=False,
        )
        for query, document in PAIRS
    ]
    texts = [Text(tokenizer.encode(text, add_special_tokens=False).ids) for text in rendered]

    found = check_alone(runner, texts)

    np.testing.assert_allclose(found[:, 0].numpy(), reference.predict(PAIRS), atol=SCORE_TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_half_precision_stays_close(family: str, tmp_path: Path) -> None:
    """bfloat16 keeps 8 bits; the pooling is computed in float32."""
    folder = save_embedder(family, tmp_path)
    _, exact = load(folder)
    loaded, half = load(folder, dtype="bfloat16")
    texts = texts_of(loaded, TEXTS)

    cosines = torch.cosine_similarity(exact.compute(texts), half.compute(texts))

    assert float(cosines.min()) >= 0.995
