"""vLLM's vectors and scores are those of sentence-transformers on the same weights, with the frames
of batchway's own engine for vectors."""

import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from contract.jobs import Pooling, SamplingParams
from tests.infra.processes import any_alive, command_of, descendants, wait_until
from tests.marks import LONG
from tests.tiny_encoders import (
    bi_encoder,
    cross_encoder,
    save_classifier,
    save_embedder,
    save_reranker,
)
from tests.workers.model.pooling.test_parity import LEAST_COSINE, PAIRS, SCORE_TOLERANCE, TEXTS
from tests.workers.vllm_engine.driven import Engine, refusal_of, running
from workers.ipc.messages import (
    EngineLoad,
    EngineOptions,
    EngineReady,
    JobFailed,
    Loading,
    Request,
    RunningJobs,
    VectorOut,
)

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

ONE_HEAD: dict[str, Any] = {"num_attention_heads": 1}  # of 32, the least on a CPU
DECODER: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def options_of(folder: Path, **arguments: str) -> EngineOptions:
    """Not compiled, which takes minutes."""
    return EngineOptions(model_path=str(folder), engine_args={"enforce_eager": "true", **arguments})


def tokenizer_of(engine: Engine) -> Tokenizer:
    [ready] = engine.of(EngineReady)
    return Tokenizer.from_str(ready.tokenizer.tokenizer_json)


def job(name: str, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Request:
    ended = ((),) * len(prompts), (False,) * len(prompts)
    prompt_ids = tuple(map(tuple, prompts))
    params = SamplingParams(max_tokens=1, seed=0)
    return Request(name, 1, "t", "standard", prompt_ids, params, *ended, pooling=pooling)


async def computed(
    engine: Engine, prompts: Sequence[Sequence[int]], pooling: Pooling
) -> NDArray[np.float32]:
    """The vectors of one job, (number of prompts, dimensions)."""
    before = len(engine.of(VectorOut))
    engine.client.send([job(f"job-{before}", prompts, pooling)])
    await engine.until(lambda: len(engine.of(VectorOut)) - before == len(prompts))
    assert not engine.of(JobFailed)
    found = sorted(engine.of(VectorOut)[before:], key=lambda out: out.choice)
    return np.array([np.frombuffer(out.vector, "<f4") for out in found])


async def of_texts(
    engine: Engine, texts: Sequence[str], pooling: Pooling | None = None
) -> NDArray[np.float32]:
    tokenizer = tokenizer_of(engine)
    prompts = [tokenizer.encode(text).ids for text in texts]
    return await computed(engine, prompts, pooling or Pooling())


async def of_pairs(engine: Engine, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
    tokenizer = tokenizer_of(engine)
    found = [tokenizer.encode(first, second) for first, second in pairs]
    first_parts = tuple(pair.type_ids.index(1) for pair in found)
    return await computed(engine, [pair.ids for pair in found], Pooling(first_parts=first_parts))


EMBEDDERS: dict[str, dict[str, Any]] = {
    "bert": {"num_dense": 1, **ONE_HEAD},
    "roberta": {"mode": "cls", "is_normalized": False, **ONE_HEAD},
    "xlm_roberta": {"num_dense": 1, "is_normalized": False, **ONE_HEAD},
    "modernbert": {"mode": "cls", **ONE_HEAD},
    "gemma3_embedding": {"num_dense": 2, **DECODER},
    "qwen3": {"mode": "lasttoken", **DECODER},
}


def sampled(families: Iterable[str]) -> list[Any]:
    """An encoder and a decoder; vLLM starts for each family, in twenty seconds."""
    return [f if f in ("bert", "qwen3") else pytest.param(f, marks=LONG) for f in families]


@pytest.mark.parametrize("family", sampled(EMBEDDERS))
async def test_embeddings_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    """With the pooling of the folder; also cut to fewer dimensions. The engine says what the own
    one does, and that vLLM was compared."""
    folder = save_embedder(family, tmp_path, **EMBEDDERS[family])
    expected = bi_encoder(folder).encode(TEXTS)
    async with running(options_of(folder)) as engine:
        [ready] = engine.of(EngineReady)
        found = await of_texts(engine, TEXTS)
        short = await of_texts(engine, TEXTS, Pooling(dimensions=8))

    assert found.shape == expected.shape
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(1) / norms).min() >= LEAST_COSINE
    np.testing.assert_allclose(found, expected, atol=SCORE_TOLERANCE)
    is_normalized = EMBEDDERS[family].get("is_normalized", True)
    lengths = np.linalg.norm(expected[:, :8], axis=1, keepdims=True) if is_normalized else 1.0
    np.testing.assert_allclose(short, expected[:, :8] / lengths, atol=SCORE_TOLERANCE)
    assert ready.pooling is not None
    assert (ready.pooling.kind, ready.pooling.num_outputs) == ("embedding", expected.shape[1])
    assert ready.tokens_per_s > 0
    assert not ready.capabilities.prompt_logprobs
    told = [loading.text for loading in engine.of(Loading)]
    for stage in ("imports: ", "weights: ", "first step: "):
        assert any(line.startswith(stage) for line in told), told
    assert any("by transformers too" in line for line in told)
    assert not any(line.startswith(("compile: ", "graphs: ")) for line in told)


CLASSIFIERS: dict[str, tuple[int, dict[str, Any]]] = {
    "bert": (3, {"type_vocab_size": 2, **ONE_HEAD}),
    "xlm_roberta": (1, ONE_HEAD),
    "modernbert": (2, ONE_HEAD),
    "qwen3": (3, DECODER),
}


@pytest.mark.parametrize("family", sampled(CLASSIFIERS))
async def test_scores_of_pairs_are_those_of_sentence_transformers(
    family: str, tmp_path: Path
) -> None:
    """Also where the two texts of a pair differ in their types."""
    import torch

    num_labels, changes = CLASSIFIERS[family]
    folder = save_classifier(family, tmp_path, num_labels, **changes)
    async with running(options_of(folder)) as engine:
        found = await of_pairs(engine, PAIRS)

    activation = torch.nn.Sigmoid() if num_labels == 1 else torch.nn.Softmax(dim=1)
    expected = cross_encoder(folder).predict(PAIRS, activation_fn=activation)
    np.testing.assert_allclose(found, expected.reshape(found.shape), atol=SCORE_TOLERANCE)


@pytest.mark.parametrize("false_id", [50, pytest.param(None, marks=LONG)])
async def test_a_reranker_scores_by_the_logits_of_tokens(
    false_id: int | None, tmp_path: Path
) -> None:
    folder = save_reranker(tmp_path, false_id, **DECODER)
    reference = cross_encoder(folder)
    tokenizer = reference.tokenizer
    rendered = [
        tokenizer.apply_chat_template(
            [
                {"role": "system", "content": reference.prompts["web"]},
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ],
            tokenize=False,
        )
        for query, document in PAIRS
    ]
    expected = reference.predict(PAIRS)
    async with running(options_of(folder)) as engine:
        prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
        found = await computed(engine, prompts, Pooling())

    np.testing.assert_allclose(found[:, 0], expected, atol=SCORE_TOLERANCE)


async def test_a_death_is_blamed_on_the_texts_of_the_step(tmp_path: Path) -> None:
    """As with the own engine: vLLM's core is killed, and the process says which jobs it computed,
    and ends. Before, a stopped job yields nothing, and a step has whole texts up to its tokens."""
    folder = save_embedder("bert", tmp_path, **ONE_HEAD)
    options = msgspec.structs.replace(options_of(folder), max_num_batched_tokens=512)
    async with running(options) as engine:
        prompts = [list(range(5, 305))] * 40
        engine.client.send([job("blamed", prompts, Pooling())])
        await engine.until(lambda: bool(engine.of(VectorOut)))
        loads = [load for load in engine.of(EngineLoad) if load.num_step_tokens]
        assert {load.num_step_tokens for load in loads} == {300}
        assert engine.of(RunningJobs)[-1] == RunningJobs(("blamed",))
        processes = descendants(engine.client.pid)
        [core, *_] = [pid for pid in processes if "EngineCore" in command_of(pid)]
        os.kill(core, signal.SIGKILL)
        await engine.client.end()
        assert len(engine.of(VectorOut)) < len(prompts)
        assert engine.of(RunningJobs)[-1] == RunningJobs(("blamed",))
        wait_until(lambda: not any_alive(processes))


async def test_vectors_that_differ_are_refused(tmp_path: Path) -> None:
    """Here because an argument changes the pooling."""
    folder = save_embedder("bert", tmp_path, **ONE_HEAD)
    other = '{"seq_pooling_type": "CLS"}'

    refusal = await refusal_of(options_of(folder, pooler_config=other))

    assert "vLLM and transformers compute vectors of" in refusal
    assert "serve it by --engine own" in refusal


async def test_a_family_that_vllm_lacks_is_refused_with_its_reason(tmp_path: Path) -> None:
    """Of the process that found it."""
    folder = save_embedder("distilbert", tmp_path, n_heads=1)

    refusal = await refusal_of(options_of(folder))

    assert f"vLLM does not load {folder}: " in refusal
    assert "does not dispatch through the Transformers attention interface" in refusal
