"""A model that makes vectors, computed by vLLM's pooling runner in the place of an encoder of
batchway's own engine: that schedules whole texts, applies activations, cuts and normalises.

vLLM chooses classes, projections and heads by rules of its own. So transformers computes some
random texts on the CPU, and vLLM must give the same for them.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm import LLMEngine, PoolingParams
from vllm.entrypoints.pooling.scoring.utils import compress_token_type_ids

from workers.engine.interface import LoadedModel, ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model
from workers.model.nvidia import visible_gpus
from workers.model.pooling.encoders import Text
from workers.model.pooling.folder import Pool, PoolingFolder
from workers.model.pooling.loading import default_step_tokens
from workers.model.pooling.runner import MAX_ERROR, PoolingRunner, Trial
from workers.vllm_engine import load
from workers.vllm_engine.pooling_arguments import config_overrides, pooling_arguments
from workers.vllm_engine.stages import Stages


class HostedTexts:
    """Texts as requests of vLLM: an Encoder. Its rows are vectors, (number of texts, H), neither
    normalised nor with an activation."""

    def __init__(self, llm: LLMEngine, task: str, *, uses_types: bool) -> None:
        self._llm = llm
        self._uses_types = uses_types
        self._task = task
        self._num_texts = 0

    def encode(self, texts: Seq[Text]) -> Tensor:
        """As `Encoder.encode`. Raises what vLLM raises if its engine has died."""
        first = self._num_texts
        self._num_texts += len(texts)
        for number, text in enumerate(texts, first):
            params = PoolingParams(task=self._task, use_activation=False)
            if self._uses_types and text.num_first:
                types = compress_token_type_ids(text.type_ids)  # its form differs with releases
                params.extra_kwargs = {"compressed_token_type_ids": types}
            self._llm.add_request(str(number), {"prompt_token_ids": [*text.token_ids]}, params)
        vectors: dict[str, Tensor] = {}
        while len(vectors) < len(texts):
            vectors |= {output.request_id: output.outputs.data for output in self._llm.step()}
        return torch.stack([vectors[str(first + index)] for index in range(len(texts))])


def load_vectors(
    found: PoolingFolder, stages: Stages, options: EngineOptions, progress: Callable[[str], None]
) -> LoadedModel:
    """Loads a model that makes vectors into vLLM. Raises ModelRefused, with the reason, if vLLM
    computes others than transformers."""
    path = options.model_path
    if options.nodes > 1:
        raise ModelRefused(f"{path} makes vectors, which needs --nodes 1")
    unshared = msgspec.structs.replace(options, prefix_caching=False)
    given = load.engine_args(unshared, pooling_arguments(found), **config_overrides(found))
    load.give_way()
    progress(f"loading {path} into vLLM, for vectors")
    with load.told_refusal(path, stages):
        config = load.engine_config(given)
        llm = LLMEngine.from_vllm_config(config)
    model: Any = config.model_config
    progress("computing random texts by transformers too, on the CPU: vLLM must give the same")
    plain = msgspec.structs.replace(
        options, device="cpu", dtype="float32", memory_share=None, max_num_batched_tokens=1
    )
    known = load_model(plain, progress)
    reference, card, gpus = known.model, known.pooling, visible_gpus()[:1]
    assert isinstance(reference, PoolingRunner)
    assert card is not None
    embeds = isinstance(found.steps[0], Pool)
    uses_types = any(text.num_first for text in reference.examples)
    device = torch.device("cuda" if gpus else "cpu")
    num_step_tokens = options.max_num_batched_tokens or default_step_tokens(device)
    runner = PoolingRunner(
        HostedTexts(llm, "embed" if embeds else "classify", uses_types=uses_types),
        lambda rows, texts: F.normalize(rows.float(), dim=-1) if found.is_normalized else rows,
        activation=card.activation,
        is_normalized=found.is_normalized,
        max_model_len=min(reference.max_model_len, model.max_model_len),
        num_step_tokens=num_step_tokens,
    )
    texts = reference.examples
    if embeds:  # of single texts
        texts = [Text(text.token_ids) for text in texts]
    with stages.timed("first step"):
        load.watch_first_step(lambda: runner.measure_rate(texts[-1], num_step_tokens), path)
    vectors, expected = runner.compute(texts), reference.compute(texts)
    same_size = vectors.shape == expected.shape
    error = Trial.error(vectors, expected) if same_size else math.inf
    if not error <= MAX_ERROR[model.dtype]:
        raise ModelRefused(
            f"vLLM and transformers compute vectors of {path} that differ by {error:.1g} of their "
            "length: serve it by --engine own"
        )
    return replace(
        known,
        model=runner,
        context_length=runner.max_model_len,
        num_step_tokens=num_step_tokens,
        tokens_per_s=runner.tokens_per_s,
        resume=load.resume_of(model),
        device=gpus[0].name if gpus else "",
        gpu_uuids=tuple(gpu.uuid for gpu in gpus),
    )
