"""Checks a loaded decoder before it serves: its layers' shapes, and whether paging is exact.

A model that bypasses our attention function would attend across sequences unnoticed; one that hides
a window in a mask would attend too far. Neither may share a batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from contract.jobs import SamplingParams
from workers.engine.interface import Chunk, ModelRefused
from workers.engine.sequence import Sequence, SequenceState
from workers.model.attention.interface import (
    ATTENTION_NAME,
    STEP_KEYWORD,
    AttentionCall,
    AttentionStep,
    CannotShareBatch,
    LayerShape,
    StepNotHandedDown,
)
from workers.model.attention.reference import attend_dense, causal_mask
from workers.model.checkpoint import first_line, layer_configs
from workers.model.runner import ModelRunner
from workers.model.states import Mixer, find_mixers
from workers.model.transformers_compat import has_attention

# Keyword arguments that do not change our attention: positions are already in the rotary embedding,
# the rest is bookkeeping.
_HARMLESS = {
    "cache_position",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_LENGTHS = (11, 5)
# Lowest cosine of logits between paged and transformers' attention, mean removed.
LOWEST_COSINE = {torch.float32: 0.9999, torch.bfloat16: 0.98, torch.float16: 0.98}


class ProbeStep:
    """AttentionStep for one plain sequence that records each layer's shape."""

    def __init__(self) -> None:
        self.shapes: dict[nn.Module, LayerShape] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []  # keys and values of each group of layers

    def attend(self, call: AttentionCall) -> Tensor:
        """See AttentionStep.attend. Raises CannotShareBatch for unsupported calls."""
        _check_call(call, is_again=call.module in self.shapes)
        self.shapes[call.module] = replace(call.shape, kv_group=self._group(call))
        num_tokens = len(call.key)
        seen = causal_mask(0, num_tokens, 0, num_tokens, call.flags.window, call.query.device)
        query, key, value = (x.transpose(0, 1)[None] for x in (call.query, call.key, call.value))
        return attend_dense(query, key, value, seen, call.flags)[0].transpose(0, 1)

    def _group(self, call: AttentionCall) -> int:
        """The group of a layer: that of an earlier one which attends to the same tensors."""
        for group, (key, value) in enumerate(self._kept):
            if call.key.data_ptr() == key.data_ptr() and call.value.data_ptr() == value.data_ptr():
                return group
        self._kept.append((call.key, call.value))
        return len(self._kept) - 1


def own_attention(name: str) -> str:
    """The message for a model that computes attention outside transformers' interface."""
    return (
        f"{name} keeps its attention to itself: no call came through transformers' attention "
        "interface"
    )


def _check_call(call: AttentionCall, *, is_again: bool) -> None:
    name = type(call.module).__name__
    unknown = {
        key for key, value in call.extra.items() if value is not None and key not in _HARMLESS
    }
    if unknown:
        names = ", ".join(sorted(unknown))
        raise CannotShareBatch(f"{name} passes what our attention has no meaning for: {names}")
    if call.extra.get("is_causal") is False or call.query.shape[0] != call.key.shape[0]:
        raise ModelRefused(f"{name} attends to something other than its own past")
    if call.has_mask:
        raise CannotShareBatch(f"{name} brings a mask of its own")
    if is_again:
        raise CannotShareBatch(f"{name} attends twice in one layer")


@torch.inference_mode()
def probe_mixers(
    decoder: Any, config: PretrainedConfig, device: torch.device
) -> tuple[dict[nn.Module, Mixer], int]:
    """See `find_mixers`. Raises CannotShareBatch."""
    try:
        with own_attention_of(decoder):
            return find_mixers(decoder, config, probe_ids(config, _PROBE_LENGTHS[0], device))
    except Exception as exc:
        raise CannotShareBatch(
            f"{type(decoder).__name__} keeps its states in a cache of its own"
        ) from exc


@torch.inference_mode()
def probe_layers(
    decoder: Any, config: PretrainedConfig, device: torch.device, num_layers: int | None = None
) -> dict[nn.Module, LayerShape]:
    """Runs a few tokens to learn each attention layer's shape. `num_layers`: those with KV, if
    others keep states. Raises CannotShareBatch, or ModelRefused for a model that is not a
    decoder."""
    if num_layers == 0:
        return {}
    if num_layers is None:
        _check_layer_types(type(decoder).__name__, config.get_text_config())
    try:
        step = _run_probe(decoder, config, device)
    except StepNotHandedDown:
        relay_step(decoder)
        step = _run_probe(decoder, config, device)
    _check_layers(step, type(decoder).__name__, config.get_text_config(), num_layers)
    return step.shapes


def _run_probe(decoder: Any, config: PretrainedConfig, device: torch.device) -> ProbeStep:
    step = ProbeStep()
    input_ids = probe_ids(config, _PROBE_LENGTHS[0], device)
    try:
        decoder(input_ids=input_ids, use_cache=False, **{STEP_KEYWORD: step})
    except ModelRefused:
        raise
    except Exception as exc:
        if not step.shapes:
            raise CannotShareBatch(own_attention(type(decoder).__name__)) from exc
        raise CannotShareBatch(
            f"{type(decoder).__name__} does not run on plain tokens: {first_line(exc)}"
        ) from exc
    return step


def _check_layer_types(name: str, text: Any) -> None:
    unknown = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        kinds = ", ".join(sorted(unknown))
        raise CannotShareBatch(
            f"{name} has layers of a kind that a paged batch has no place for ({kinds})"
        )


def _check_layers(step: ProbeStep, name: str, text: Any, num_layers: int | None) -> None:
    num_layers = num_layers or int(text.num_hidden_layers)
    if not step.shapes:
        raise CannotShareBatch(own_attention(name))
    if len(step.shapes) != num_layers:
        raise CannotShareBatch(
            f"{len(step.shapes)} of the {num_layers} layers of {name} attend through "
            "transformers' attention interface"
        )
    layer_types = getattr(text, "layer_types", None)
    layers = layer_configs(text)
    num_windows = sum(bool(getattr(layer, "sliding_window", None)) for layer in layers)
    num_windows *= num_layers // len(layers)
    if layer_types:
        num_windows = sum(kind == "sliding_attention" for kind in layer_types)
    num_told = sum(shape.flags.window is not None for shape in step.shapes.values())
    if num_told < num_windows:
        raise CannotShareBatch(
            f"{name} has {num_windows} layers with a sliding window but tells its attention of "
            f"{num_told}"
        )


@torch.inference_mode()
def check_parity(
    decoder: Any, runner: ModelRunner, config: PretrainedConfig, device: torch.device
) -> None:
    """Raises CannotShareBatch if a paged batch of two differs from transformers' attention or
    raises."""
    prompts = [probe_ids(config, n, device) for n in _PROBE_LENGTHS]
    chunks = [
        Chunk(sequence, 0, sequence.num_prompt, samples=True)
        for sequence in probe_sequences(prompts, runner.block_size)
    ]
    try:
        paged = runner.logits(chunks).float()
        own = _own_logits(decoder, prompts)
    except ModelRefused:
        raise
    except Exception as exc:
        raise CannotShareBatch(
            f"{type(decoder).__name__} does not run in a paged batch: {first_line(exc)}"
        ) from exc
    cosine = torch.cosine_similarity(centred(paged), centred(own), dim=-1)
    lowest = float(cosine.min())
    if not lowest >= LOWEST_COSINE[decoder.dtype]:
        raise CannotShareBatch(
            f"{type(decoder).__name__} gives other logits in a paged batch than by transformers' "
            f"own attention (cosine {lowest:.4f})"
        )


def _own_logits(decoder: Any, prompts: list[Tensor]) -> Tensor:
    """Logits (num_prompts, vocab_size) of each prompt's last token, by transformers' attention."""
    with own_attention_of(decoder):
        outputs = [decoder(input_ids=ids, use_cache=False) for ids in prompts]
    return torch.stack([output.logits[0, -1].float() for output in outputs])


@contextmanager
def own_attention_of(decoder: Any) -> Iterator[None]:
    """Gives the decoder transformers' attention for a while, if it has ours."""
    has_ours = has_attention(decoder, ATTENTION_NAME)
    if has_ours:
        decoder.set_attn_implementation("eager")
    try:
        yield
    finally:
        if has_ours:
            decoder.set_attn_implementation(ATTENTION_NAME)


def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def probe_ids(config: PretrainedConfig, num_tokens: int, device: torch.device) -> Tensor:
    """(1, num_tokens) ids spread over the vocabulary."""
    vocab_size = int(config.get_text_config().vocab_size)
    ids = (torch.arange(num_tokens, device=device) * 7919 + num_tokens) % vocab_size
    return ids[None]


def probe_sequences(prompts: list[Tensor], block_size: int) -> list[Sequence]:
    """One sequence per prompt (1, num_tokens), with blocks in reverse order."""
    sequences = []
    next_block = 0
    for slot, prompt in enumerate(reversed(prompts)):
        token_ids = prompt[0].tolist()
        num_blocks = -(-len(token_ids) // block_size)
        sequence = probe_sequence(token_ids, len(token_ids))
        sequence.state = SequenceState(slot)
        sequence.block_ids += reversed(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        sequences.append(sequence)
    return sequences[::-1]


def probe_sequence(token_ids: list[int], num_prompt: int, **params: Any) -> Sequence:
    """A sequence of no job, with these sampling parameters."""
    sampling = SamplingParams(**({"max_tokens": 1, "seed": 0} | params))
    return Sequence("probe", 0, 0, "", "", token_ids, num_prompt, sampling)


def relay_step(decoder: nn.Module) -> None:
    """Makes the forward's step reach attention modules whose layers do not pass keyword arguments
    on (StableLM, Nemotron)."""
    relay = _StepRelay()
    decoder.register_forward_pre_hook(relay.take, with_kwargs=True)
    decoder.register_forward_hook(relay.forget, always_call=True)
    for module in decoder.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(relay.give, with_kwargs=True)


class _StepRelay:
    def __init__(self) -> None:
        self._step: AttentionStep | None = None

    def take(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._step = kwargs.get(STEP_KEYWORD)

    def give(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if self._step is None:
            return None
        return args, kwargs | {STEP_KEYWORD: self._step}

    def forget(self, module: nn.Module, args: Any, output: Any) -> None:
        self._step = None
