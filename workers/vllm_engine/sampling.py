"""How a choice is sampled on vLLM, so that a resumed job goes on as it would have.

vLLM has two runners, and each a sampler and an interface for logits processors of its own. The new
one (Model Runner V2) takes its noise from the seed and the position, and needs our processor for
grammars and for penalties alone, beside speculative decoding too. The old one, which CPUs and some
models have, draws from a generator whose state is lost with the process: there our processor draws,
and vLLM takes none beside speculative decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as VllmParams

from contract.errors import ErrorCode
from contract.jobs import SamplingParams
from workers.engine.grammar import GrammarFailed, Grammars
from workers.engine.sequence import RequestRefused, Sequence
from workers.model.checkpoint import DEFAULT_REVISION
from workers.model.files import ModelFiles
from workers.model.generation import end_token_ids
from workers.model.sampler import LOWEST_TEMPERATURE, asks_for_change
from workers.model.tokenizer import read_tokenizer

_EXTRA = "batchway"  # the key in vLLM's `SamplingParams.extra_args`


class ChoiceParams(msgspec.Struct, frozen=True):
    """What our processor must know of a choice; the token ids come from vLLM."""

    params: SamplingParams
    choice: int
    num_prompt: int  # of the request's prompt ids; logged output follows them
    ending_ids: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How an engine samples: arguments of vLLM's SamplingParams for a choice, which raise
    RequestRefused, its processor (`module:class`), and whether a resumed choice draws with the
    noise that it would have had."""

    arguments: Callable[[Sequence], dict[str, Any]]
    processor: str | None
    keeps_noise: bool = True


def sampling_of(config: VllmConfig) -> Sampling:
    """Returns what the engine of this configuration can do."""
    drafts = config.speculative_config is not None
    if config.use_v2_model_runner:
        # Whether a token was a draft decides which noise it takes.
        processor = "workers.vllm_engine.runner_v2_compat:CountedOutput"
        return Sampling(_by_position, processor, keeps_noise=not drafts)
    if drafts:
        return Sampling(_anew, None, keeps_noise=False)
    return Sampling(_by_processor, "workers.vllm_engine.runner_v1_compat:SeededSampling")


def choice_of(params: VllmParams) -> ChoiceParams | None:
    """Returns what `Sampling.arguments` sent; None if the choice does not need the processor."""
    encoded = (params.extra_args or {}).get(_EXTRA)
    return None if encoded is None else msgspec.json.decode(encoded, type=ChoiceParams)


def _sent(sequence: Sequence) -> dict[str, str]:
    num_prompt = sequence.num_prompt + sequence.num_image_tokens  # as vLLM has it
    choice = ChoiceParams(sequence.params, sequence.choice, num_prompt, tuple(sequence.ending_ids))
    return {_EXTRA: msgspec.json.encode(choice).decode()}


def _by_processor(sequence: Sequence) -> dict[str, Any]:
    """Greedy; the processor draws if the choice asks for more."""
    params = sequence.params
    is_greedy = params.temperature < LOWEST_TEMPERATURE and not asks_for_change(sequence)
    if is_greedy and not params.grammar:
        return {"temperature": 0.0}
    return {"temperature": 0.0, "extra_args": _sent(sequence)}


def _by_position(sequence: Sequence) -> dict[str, Any]:
    """vLLM's sampler; the processor masks, and counts the output that vLLM takes for prompt. It
    also hands `logit_bias` and `min_p` to vLLM, whose check of requests refuses them beside
    speculative decoding, though its sampler applies them; and the tokens of `bad_words`, which vLLM
    would find by its own tokenizer. vLLM does not see the start of a bad word that ends a logged
    output."""
    params = sequence.params
    seed = (params.seed + (sequence.choice_of_prompt << 32)) % 2**63
    changes = params.grammar, params.logit_bias, params.min_p, params.bad_words
    penalties = params.presence_penalty, params.frequency_penalty
    extra = {"extra_args": _sent(sequence)} if any((*changes, *penalties)) else {}
    return _limits(sequence) | {"seed": seed} | extra


def _anew(sequence: Sequence) -> dict[str, Any]:
    """vLLM's sampler alone. A resumed choice draws from another seed, so that it does not repeat
    the noise of its first tokens; penalties count its logged output as prompt. Raises
    RequestRefused for parameters without effect beside speculative decoding."""
    params = sequence.params
    if refused := [name for name in _NOT_BESIDE_DRAFTS if getattr(params, name)]:
        name = refused[0]
        message = f"{name} has no effect beside speculative decoding"
        raise RequestRefused(ErrorCode.BAD_PARAMETER, message)
    return _limits(sequence) | {
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": (params.seed + (sequence.choice << 32) + sequence.num_output) % 2**63,
    }


_NOT_BESIDE_DRAFTS = "min_p", "logit_bias", "bad_words"


def _limits(sequence: Sequence) -> dict[str, Any]:
    params = sequence.params
    draws = params.temperature >= LOWEST_TEMPERATURE
    return {
        "temperature": params.temperature if draws else 0.0,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": max(0, params.min_tokens - sequence.num_output),
    }


def grammars_of(config: VllmConfig) -> Grammars | None:
    """Returns the compiler of grammars; None if llguidance cannot read the model's tokenizer."""
    model = config.model_config
    revision = model.revision or DEFAULT_REVISION
    tokenizer = read_tokenizer(model.model, revision)
    end_ids = end_token_ids(ModelFiles(model.model, revision), model.hf_config, tokenizer)
    try:
        return Grammars(tokenizer.tokenizer_json, model.get_vocab_size(), end_ids)
    except GrammarFailed:
        return None
