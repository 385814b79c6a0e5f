"""Prefill-only models through `batchway up`: callers get the vectors, scores and labels of
sentence-transformers and transformers on the same weights."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.gateway.test_welcome import curl_of, printed
from tests.infra.stack import Stack, running_demo_stack, running_fleet
from tests.tiny_encoders import (
    bi_encoder,
    cross_encoder,
    save_classifier,
    save_embedder,
    save_reranker,
)

pytestmark = [pytest.mark.e2e, pytest.mark.campaign]

TEXTS = ["a", "the quick brown fox", "Hello, world! " * 5, "ein Satz mit Umlauten: äöü"]
QUERY = "what is it?"
PROMPTS = {"query": "query: ", "document": "passage: ", "classification": "c: "}
LEAST_COSINE = 0.9999
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind, by the name under which it is served."""
    root = tmp_path_factory.mktemp("models")
    plain = save_classifier("bert", root / "plain", 3, type_vocab_size=2)
    cross_encoder(plain).save(str(root / "saved"), create_model_card=False)
    options: dict[str, Any] = {"prompts": PROMPTS, "default_prompt": "classification"}
    return {
        "embedder": save_embedder("bert", root / "embedder", **options),
        "reranker": save_reranker(root / "reranker"),
        "classifier": root / "saved",
    }


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One `batchway up` of all kinds."""
    file = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    rows = (
        f"- {{model: {folder}, served_model_name: {name}, device: cpu, memory_share: 0.2}}\n"
        for name, folder in folders.items()
    )
    file.write_text("models:\n" + "".join(rows))
    with running_fleet(file) as stack:
        stack.wait_for("Ctrl-C ends it.")
        stack.wait_for("is ready (3 of 3)")
        yield stack


def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_cosines(found: Any, expected: Any) -> None:
    first, second = np.asarray(found), np.asarray(expected)
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1)
    assert (cosines / np.linalg.norm(second, axis=1)).min() >= LEAST_COSINE


def test_up_prints_an_embedding_for_an_embedder(stack: Stack) -> None:
    """The first model of the fleet; from the card that its worker has published."""
    answer = asyncio.run(printed(curl_of("\n".join(stack.lines))))
    assert '"embedding":[' in answer


def test_embeddings_are_those_of_sentence_transformers(
    stack: Stack, folders: dict[str, Path]
) -> None:
    """By the official client: with the default instruction, and those of queries and documents;
    a ranking has their cosines."""
    peer = bi_encoder(folders["embedder"])
    queries, documents = peer.encode_query([QUERY]), peer.encode_document(TEXTS)
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        plain = client.embeddings.create(model="embedder", input=TEXTS)
        asked = client.embeddings.create(
            model="embedder", input=[QUERY], extra_body={"input_type": "query"}
        )
    ranking = ask(stack.url, "/v1/rerank", model="embedder", query=QUERY, documents=TEXTS)
    check_cosines([each.embedding for each in plain.data], peer.encode(TEXTS))
    check_cosines([asked.data[0].embedding], queries)
    scores = {each["index"]: each["relevance_score"] for each in ranking["results"]}
    expected = peer.similarity(queries, documents)[0].tolist()
    assert [scores[index] for index in range(len(TEXTS))] == pytest.approx(expected, abs=TOLERANCE)


def check_scores(url: str, model: str, folder: Path) -> None:
    """Compares scores of pairs, and the ranking by them, with a cross-encoder."""
    expected = cross_encoder(folder).predict([(QUERY, text) for text in TEXTS])
    ranking = ask(url, "/v1/rerank", model=model, query=QUERY, documents=TEXTS)
    scored = ask(url, "/v1/score", model=model, text_1=QUERY, text_2=TEXTS)
    scores = [each["score"] for each in scored["data"]]
    assert scores == pytest.approx(expected.tolist(), abs=TOLERANCE)
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    assert [each["index"] for each in ranking["results"]] == order


def test_scores_are_those_of_a_cross_encoder(stack: Stack, folders: dict[str, Path]) -> None:
    """Of pairs that a chat template renders."""
    check_scores(stack.url, "reranker", folders["reranker"])


def test_labels_of_pairs_are_those_of_a_cross_encoder(
    stack: Stack, folders: dict[str, Path]
) -> None:
    """Whose texts differ in their types; a single text is refused."""
    pairs = [[QUERY, text] for text in TEXTS]
    found = ask(stack.url, "/v1/classify", model="classifier", input=pairs)["data"]
    single = httpx.post(stack.url + "/v1/classify", json={"model": "classifier", "input": TEXTS})
    reference = cross_encoder(folders["classifier"])
    expected = reference.predict(pairs, activation_fn=torch.nn.Softmax(dim=1))
    np.testing.assert_allclose([each["probs"] for each in found], expected, atol=TOLERANCE)
    assert single.status_code == 400


@pytest.mark.campaign
@pytest.mark.long  # test_parity.py has the scores of such pairs, the labels above their way
def test_scores_of_pairs_with_types_are_those_of_a_cross_encoder(tmp_path: Path) -> None:
    folder = save_classifier("bert", tmp_path, 1, type_vocab_size=2)
    with running_demo_stack(f"--model={folder}", "--served-model-name=m") as stack:
        check_scores(stack.url, "m", folder)


@pytest.mark.campaign
@pytest.mark.long  # test_parity.py has the labels of single texts, the labels above their way
def test_labels_are_those_of_transformers(tmp_path: Path) -> None:
    """With the probability of each."""
    folder = save_classifier("roberta", tmp_path, 3)
    with running_demo_stack(f"--model={folder}", "--served-model-name=m") as stack:
        found = ask(stack.url, "/v1/classify", model="m", input=TEXTS)["data"]
        ids = [list(text.encode()) for text in ("ab", "cdefg")]
        of_ids = ask(stack.url, "/v1/classify", model="m", input=ids)["data"]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for token_ids, one in zip(ids, of_ids, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([token_ids])).logits.softmax(-1)[0].tolist()
        assert one["probs"] == pytest.approx(expected, abs=TOLERANCE)
        assert one["label"] == f"LABEL_{max(range(3), key=expected.__getitem__)}"
    assert [each["num_classes"] for each in found] == [3] * len(TEXTS)
