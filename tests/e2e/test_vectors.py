"""Prefill-only models through `batchway up`: callers get the vectors, scores and labels of
sentence-transformers and transformers on the same weights."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification

from tests.infra.stack import running_demo_stack
from tests.tiny_encoders import save_classifier, save_embedder, save_reranker

pytestmark = pytest.mark.e2e

TEXTS = ["a", "the quick brown fox", "Hello, world! " * 5, "ein Satz mit Umlauten: äöü"]
QUERY = "what is it?"
PROMPTS = {"query": "query: ", "document": "passage: ", "classification": "c: "}
LEAST_COSINE = 0.9999
TOLERANCE = 1e-5


def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_cosines(found: Any, expected: Any) -> None:
    first, second = np.asarray(found), np.asarray(expected)
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1)
    assert (cosines / np.linalg.norm(second, axis=1)).min() >= LEAST_COSINE


def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """By the official client: with the default instruction, and those of queries and documents;
    a ranking has their cosines."""
    folder = save_embedder("bert", tmp_path, prompts=PROMPTS, default_prompt="classification")
    peer = SentenceTransformer(str(folder), device="cpu")
    queries, documents = peer.encode_query([QUERY]), peer.encode_document(TEXTS)
    with running_demo_stack(f"--model={folder}", "--served-model-name=m") as stack:
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none")
        plain = client.embeddings.create(model="m", input=TEXTS)
        asked = client.embeddings.create(
            model="m", input=[QUERY], extra_body={"input_type": "query"}
        )
        ranking = ask(stack.url, "/v1/rerank", model="m", query=QUERY, documents=TEXTS)
        client.close()
    check_cosines([each.embedding for each in plain.data], peer.encode(TEXTS))
    check_cosines([asked.data[0].embedding], queries)
    scores = {each["index"]: each["relevance_score"] for each in ranking["results"]}
    expected = peer.similarity(queries, documents)[0].tolist()
    assert [scores[index] for index in range(len(TEXTS))] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("kind", ["template", "types"])
def test_scores_are_those_of_a_cross_encoder(kind: str, tmp_path: Path) -> None:
    """Of pairs that a chat template renders, and of pairs whose texts differ in their types."""
    if kind == "template":
        folder = save_reranker(tmp_path)
    else:
        folder = save_classifier("bert", tmp_path, 1, type_vocab_size=2)
    expected = CrossEncoder(str(folder), device="cpu").predict([(QUERY, text) for text in TEXTS])
    with running_demo_stack(f"--model={folder}", "--served-model-name=m") as stack:
        ranking = ask(stack.url, "/v1/rerank", model="m", query=QUERY, documents=TEXTS)
        scored = ask(stack.url, "/v1/score", model="m", text_1=QUERY, text_2=TEXTS)
    scores = [each["score"] for each in scored["data"]]
    assert scores == pytest.approx(expected.tolist(), abs=TOLERANCE)
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    assert [each["index"] for each in ranking["results"]] == order


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


def test_labels_of_pairs_are_those_of_a_cross_encoder(tmp_path: Path) -> None:
    """Whose texts differ in their types; a single text is refused."""
    plain = save_classifier("bert", tmp_path / "plain", 3, type_vocab_size=2)
    reference = CrossEncoder(str(plain), device="cpu")
    folder = tmp_path / "saved"
    reference.save(str(folder), create_model_card=False)
    pairs = [[QUERY, text] for text in TEXTS]
    with running_demo_stack(f"--model={folder}", "--served-model-name=m") as stack:
        found = ask(stack.url, "/v1/classify", model="m", input=pairs)["data"]
        single = httpx.post(stack.url + "/v1/classify", json={"model": "m", "input": TEXTS})
    expected = reference.predict(pairs, activation_fn=torch.nn.Softmax(dim=1))
    np.testing.assert_allclose([each["probs"] for each in found], expected, atol=TOLERANCE)
    assert single.status_code == 400
