"""A model that makes vectors, computed by vLLM's pooling runner in the place of an encoder of
batchway's own engine: that schedules whole texts, applies activations, cuts and normalises.

vLLM chooses classes, poolings, projections and heads by rules of its own. So transformers computes
some random texts on the CPU first, and vLLM must give the same for them.
"""

import gc
import json
import math
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from vllm import LLMEngine, PoolingParams

from workers.engine.interface import LoadedModel, ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model.checkpoint import read_config
from workers.model.loader import load_model
from workers.model.nvidia import visible_gpus
from workers.model.pooling import folder
from workers.model.pooling.encoders import Text
from workers.model.pooling.loading import default_step_tokens
from workers.model.pooling.runner import MAX_ERROR, PoolingRunner, largest_error, random_texts
from workers.vllm_engine.load import (
    engine_args,
    engine_config,
    give_way,
    resume_of,
    told_refusal,
    watch_first_step,
)

_POOLINGS = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}  # by vLLM's names


class HostedTexts:
    """Texts as requests of vLLM: an Encoder. Its rows are vectors, (number of texts, H), neither
    normalised nor with an activation."""

    def __init__(self, llm: LLMEngine, task: str, *, uses_types: bool) -> None:
        self.uses_types = uses_types
        self._llm = llm
        self._task = task
        self._num_texts = 0

    def encode(self, texts: Seq[Text]) -> Tensor:
        """As `Encoder.encode`. Raises what vLLM raises if its engine has died."""
        first = self._num_texts
        self._num_texts += len(texts)
        for number, text in enumerate(texts, first):
            params = PoolingParams(task=self._task, use_activation=False)
            if self.uses_types and text.num_first:
                params.extra_kwargs = {"compressed_token_type_ids": text.num_first}
            prompt = {"prompt_token_ids": list(text.token_ids)}
            self._llm.add_request(str(number), prompt, params)
        vectors: dict[str, Tensor] = {}
        while len(vectors) < len(texts):
            vectors |= {output.request_id: output.outputs.data for output in self._llm.step()}
        return torch.stack([vectors[str(first + index)] for index in range(len(texts))])


def load_vectors(options: EngineOptions, progress: Callable[[str], None]) -> LoadedModel:
    """Loads a model that makes vectors into vLLM. Raises ModelRefused, with the reason, if vLLM
    computes others than transformers."""
    path = options.model_path
    found = folder.read_folder(path, options.revision)
    assert found is not None, "a model that generates text is loaded by `start_vllm`"
    if options.nodes > 1:
        raise ModelRefused(f"{path} makes vectors, which needs --nodes 1")
    arguments = _arguments(found)
    config = read_config(path, found.files.revision, pools=True)
    progress(f"computing some texts of {path} by transformers, to compare vLLM's results")
    plain = {"device": "cpu", "dtype": "float32", "memory_share": None, "max_num_batched_tokens": 1}
    known = load_model(msgspec.structs.replace(options, **plain), progress)
    reference, card = known.model, known.pooling
    assert isinstance(reference, PoolingRunner)
    assert card is not None
    is_embedding = isinstance(found.steps[0], folder.Pool)
    uses_types = reference.encoder.uses_types and not is_embedding
    texts = random_texts(config, reference.max_model_len, uses_types=uses_types)
    expected = reference.compute(texts)
    longest = reference.max_model_len
    del reference
    known = replace(known, model=None)
    gc.collect()

    progress(f"loading {path} into vLLM, for vectors")
    sized = msgspec.structs.replace(options, max_model_len=longest, prefix_caching=False)
    overrides = _score_overrides(found, config, known.tokenizer.tokenizer_json)
    given = engine_args(sized, arguments, **overrides)
    give_way()
    # The reference has computed in this process, whose threads a fork would not have.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with told_refusal(path):
        vllm_config = engine_config(given)
        llm = LLMEngine.from_vllm_config(vllm_config)
    model: Any = vllm_config.model_config
    gpus = visible_gpus()[:1]
    device = torch.device("cuda" if gpus else "cpu")
    num_step_tokens = options.max_num_batched_tokens or default_step_tokens(device)
    runner = PoolingRunner(
        HostedTexts(llm, "embed" if is_embedding else "classify", uses_types=uses_types),
        _unit_length if found.is_normalized else _unchanged,
        activation=card.activation,
        is_normalized=found.is_normalized,
        max_model_len=longest,
        num_step_tokens=num_step_tokens,
    )

    computed: list[Tensor] = []

    def compute() -> None:
        computed.append(runner.compute(texts))
        runner.measure_rate(texts[-1], num_step_tokens)

    watch_first_step(compute, path)
    _check(computed[0], expected, path, MAX_ERROR[model.dtype])
    return replace(
        known,
        model=runner,
        num_step_tokens=num_step_tokens,
        tokens_per_s=runner.tokens_per_s,
        resume=resume_of(model),
        device=gpus[0].name if gpus else "",
        gpu_uuids=tuple(gpu.uuid for gpu in gpus),
    )


def _arguments(found: folder.PoolingFolder) -> dict[str, str]:
    """vLLM's arguments for the folder's steps. Raises ModelRefused for steps that it has not."""
    first, *others = found.steps
    pooler: dict[str, Any] = {"use_activation": False}
    if isinstance(first, folder.Pool):
        if len(first.modes) > 1 or first.modes[0] not in _POOLINGS:
            raise _refusal(found, f"the pooling {' with '.join(first.modes)}")
        pooler["seq_pooling_type"] = _POOLINGS[first.modes[0]]
    elif others:
        raise _refusal(found, f"a {type(others[0]).__name__} behind its scores")
    for step in others:
        if isinstance(step, folder.Dense) and step.adds_input:
            raise _refusal(found, "a Dense that adds its input")
    return {"runner": "pooling", "pooler_config": json.dumps(pooler)}


def _refusal(found: folder.PoolingFolder, what: str) -> ModelRefused:
    return ModelRefused(
        f"{found.files.model_path} has {what}, which vLLM does not compute: serve it by "
        "--engine own"
    )


def _score_overrides(
    found: folder.PoolingFolder, config: Any, tokenizer_json: str
) -> dict[str, Any]:
    """What makes vLLM load a decoder as a classifier whose weights are those of tokens."""
    step = found.steps[0]
    if not isinstance(step, folder.LogitScore):
        return {}
    ids = [step.true_id] if step.false_id is None else [step.false_id, step.true_id]
    tokenizer = Tokenizer.from_str(tokenizer_json)
    names = [name.replace("ForCausalLM", "") for name in config.architectures]
    return {
        "architectures": [f"{name}ForSequenceClassification" for name in names],
        "classifier_from_token": [tokenizer.id_to_token(token_id) for token_id in ids],
        "method": "no_post_processing" if step.false_id is None else "from_2_way_softmax",
    }


def _check(found: Tensor, expected: Tensor, path: str, most: float) -> None:
    """Raises ModelRefused unless vLLM's results are those of transformers."""
    same_size = found.shape == expected.shape
    error = largest_error(found, expected) if same_size else math.inf
    if error <= most:
        return
    how = f"by {error:.1g} of their length" if same_size else f"in size, {found.shape[1]}"
    raise ModelRefused(
        f"vLLM computes other vectors of {path} than transformers, which differ {how}: serve it by "
        "--engine own"
    )


def _unit_length(rows: Tensor, texts: Seq[Text]) -> Tensor:
    return F.normalize(rows.float(), dim=-1)


def _unchanged(rows: Tensor, texts: Seq[Text]) -> Tensor:
    return rows
