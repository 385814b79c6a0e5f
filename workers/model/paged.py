"""Builds the runner of a decoder whose sequences share a batch: checks it, replaces modules by
faster ones and checks the result, and runs the largest step, whose memory is measured."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from workers.engine.interface import DEFAULT_STEP_TOKENS, ModelRefused, Padding
from workers.model.attention.interface import LayerShape
from workers.model.backend import Backend, choose_backend
from workers.model.fusion.exchange import ATTENTION, Exchange, Exchanged
from workers.model.kv_cache import KVCache, token_bytes
from workers.model.loaded import Loaded
from workers.model.matmul_choice import Products
from workers.model.memory import Card, touch, use_huge_pages
from workers.model.probe import check_parity, probe_layers, probe_mixers, probe_sequence
from workers.model.proof import difference, record, streamline
from workers.model.quantization import num_weight_bytes
from workers.model.runner import ModelRunner
from workers.model.sampler import sample
from workers.model.sequential import check_states
from workers.model.states import Mixer, StateCache

_DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 20},
)


@torch.inference_mode()
def warm_up(runner: ModelRunner, num_tokens: int, num_rows: int) -> None:
    """Computes `num_tokens` of padding with all their logits, as if log probabilities of a prompt
    were asked for, and samples `num_rows` of them in every way. Writes only the scratch block."""
    longest = min(num_tokens, runner.max_model_len)
    starts = range(0, num_tokens, longest)
    padding = [Padding(0, min(longest, num_tokens - start)) for start in starts]
    logits = runner.padding_logits(padding)
    sample(
        logits[:num_rows],
        [probe_sequence([0], 1, **_DRAWS[number % 2]) for number in range(num_rows)],
    )


log = logging.getLogger(__name__)

_MOST_PROBES = 4  # sequences of a check at load
# A smaller difference may be noise.
_NOTABLE_SLOWDOWN = 1.15
# Smaller weights fit the CPU's caches.
_LEAST_HUGE_BYTES = 2**24
# Prefaults at most min(512 MiB, 8 × the weights' bytes).
_MOST_READY_BYTES = 2**29
_READY_PER_WEIGHT = 8


def paged_runner(loaded: Loaded, progress: Callable[[str], None]) -> ModelRunner:
    """Returns the runner. Raises CannotShareBatch if the model cannot be paged, ModelRefused if it
    cannot run."""
    weight_bytes = num_weight_bytes(loaded.decoder, "cpu")
    runner = _right_runner(loaded, progress)
    if (card := loaded.measured) is not None:
        _fill(runner, loaded, card, progress)
    progress("preparing the memory of the KV cache")
    if loaded.options.fused and weight_bytes >= _LEAST_HUGE_BYTES:
        num_bytes = use_huge_pages(runner.cache.storages.values())
        progress(f"{num_bytes / 2**20:.0f} MiB lie on huge pages")
    if loaded.device.type == "cpu":
        touch(runner.cache.tensors, min(_MOST_READY_BYTES, _READY_PER_WEIGHT * weight_bytes))
    return runner


def _right_runner(loaded: Loaded, progress: Callable[[str], None]) -> ModelRunner:
    """Replaces modules, or none if the whole model then differs. Reads the weights again for that,
    as replaced modules change their layout."""
    if (found := _exchanged_runner(loaded, progress)) is not None:
        return found
    progress("no module is exchanged, and the weights are read again")
    loaded.renew(progress)
    runner, _, _ = _untouched_runner(loaded, progress)
    record(runner, loaded.decoder, loaded.config, ())
    return runner


def _exchanged_runner(loaded: Loaded, progress: Callable[[str], None]) -> ModelRunner | None:
    """Returns None if the model with replaced modules differs. Raises CannotShareBatch if even the
    unmodified model does not run."""
    runner, backend, shapes = _untouched_runner(loaded, progress)
    decoder, config = loaded.decoder, loaded.config
    if backend.layout is None:
        record(runner, decoder, config, ())
        return runner
    progress("choosing this processor's fastest products and modules")
    exchange = Exchange(decoder, shapes, runner.cache, backend.kernels, backend.layout)
    candidates = exchange.candidates()
    untouched = record(runner, decoder, config, candidates)
    done = exchange.apply(candidates, untouched.calls)
    _report(done, len(shapes), progress)
    _warn_if_slower(backend.layout.products, loaded)
    if reason := difference(runner, decoder, untouched):
        progress(f"with these the whole model is not what it was: {reason}")
        return None
    if streamline(runner, decoder, untouched):
        progress("its layers run as one loop")
    return runner


def _untouched_runner(
    loaded: Loaded, progress: Callable[[str], None]
) -> tuple[ModelRunner, Backend, dict[str, LayerShape]]:
    """A runner with the original modules that pages correctly, its back end, and its layers' shapes
    by name. Raises CannotShareBatch."""
    decoder = loaded.decoder
    mixers, num_layers = probe_mixers(decoder, loaded.config, loaded.device)
    states = _build_states(loaded, mixers) if mixers else None
    shapes = probe_layers(decoder, loaded.config, loaded.device, num_layers if mixers else None)
    cache = _build_cache(loaded, shapes, states)
    backend = choose_backend(
        loaded.options.attention,
        loaded.dtype,
        loaded.device,
        progress,
        fused=loaded.options.fused,
        shapes=shapes.values(),
        weight_bytes=num_weight_bytes(decoder, "cpu"),
        processor=loaded.processor,
    )
    runner = ModelRunner(
        decoder,
        cache,
        backend.attention,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=loaded.max_model_len if loaded.measured else loaded.longest(cache.num_blocks),
        device=loaded.device,
        kernels=backend.kernels,
        states=states,
    )
    progress("comparing a batch with transformers' own attention")
    check_parity(decoder, runner, loaded.config, loaded.device)
    if states is not None:
        check_states(decoder, runner, loaded.config, loaded.device)
        progress(
            f"states of {states.num_slots} sequences and prefixes ({states.num_bytes / 2**20:.0f} "
            "MiB) lie beside the KV cache"
        )
    names = {name: shapes[m] for name, m in decoder.named_modules() if m in shapes}
    return runner, backend, names


def _build_states(loaded: Loaded, mixers: Mapping[nn.Module, Mixer]) -> StateCache:
    """Builds states for all sequences, and up to twice as many for prefixes in half of the memory
    that the KV cache shares with them. Raises ModelRefused."""
    num_places = max(loaded.options.num_places, _MOST_PROBES)
    slot_bytes = sum(mixer.num_bytes for mixer in mixers.values())
    num_bytes = loaded.kv_bytes(0, num_places * slot_bytes)
    if num_bytes < num_places * slot_bytes:
        raise ModelRefused(
            f"{num_bytes} bytes do not hold the states of max_num_seqs {num_places} sequences, "
            f"{slot_bytes} bytes each; fewer sequences may"
        )
    num_slots = min(3 * num_places, max(num_places, num_bytes // 2 // slot_bytes))
    return StateCache(mixers, num_slots, loaded.device)


def _build_cache(
    loaded: Loaded, shapes: Mapping[nn.Module, LayerShape], states: StateCache | None
) -> KVCache:
    """Builds a cache of the final size, or a small one if a step must be measured first."""
    num_blocks = 4 * _blocks_per_probe(loaded)
    if loaded.measured is None:
        num_bytes = token_bytes(shapes.values(), loaded.dtype)
        num_blocks = _num_blocks(loaded, num_bytes, fixed_bytes=states.num_bytes if states else 0)
    return KVCache(shapes, num_blocks, loaded.block_size, loaded.dtype, loaded.device)


def _fill(runner: ModelRunner, loaded: Loaded, card: Card, progress: Callable[[str], None]) -> None:
    """Gives the cache what the largest step leaves of the card's memory."""
    num_tokens = loaded.options.max_num_batched_tokens or DEFAULT_STEP_TOKENS
    num_rows = min(loaded.options.num_places, num_tokens)
    step_bytes = card.peak_bytes(lambda: warm_up(runner, num_tokens, num_rows))
    progress(f"a step of {num_tokens} tokens takes {step_bytes / 2**20:.0f} MiB")
    cache = runner.cache
    num_token_bytes = cache.num_bytes // ((cache.num_blocks + 1) * cache.block_size)
    num_blocks = _num_blocks(loaded, num_token_bytes, step_bytes)
    cache.resize(num_blocks)
    runner.max_model_len = loaded.longest(num_blocks)


def _num_blocks(
    loaded: Loaded, num_token_bytes: int, step_bytes: int | None = None, fixed_bytes: int = 0
) -> int:
    """The blocks that memory holds beside `fixed_bytes`, at most what all sequences could fill.
    Raises ModelRefused."""
    if num_token_bytes == 0:
        return loaded.most_blocks
    num_bytes = loaded.kv_bytes(num_token_bytes, fixed_bytes, step_bytes) - fixed_bytes
    block_bytes = num_token_bytes * loaded.block_size
    num_blocks = min(num_bytes // block_bytes, loaded.most_blocks)
    needed = 2 * _blocks_per_probe(loaded)
    if num_blocks < needed:
        raise ModelRefused(
            f"{num_bytes} bytes hold {num_blocks} blocks of KV of {block_bytes} bytes each; "
            f"at least {needed} are needed"
        )
    return num_blocks


def _blocks_per_probe(loaded: Loaded) -> int:
    """The blocks of one sequence of the checks."""
    return -(-16 // loaded.block_size)


def _report(done: Exchanged, num_layers: int, progress: Callable[[str], None]) -> None:
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in done.exchanged.items())
    progress(f"merged or packed for this processor: {counts or 'nothing'}")
    for kind, names in done.refused.items():
        progress(f"{len(names)} {kind} would differ and stay as they are: {_listed(names)}")
    if num_own := num_layers - len(done.exchanged.get(ATTENTION, ())):
        progress(f"{num_own} of {num_layers} attention layers stay as they are, unfused")


def _warn_if_slower(products: Products, loaded: Loaded) -> None:
    """Warns with the measured factors if float32 would be faster."""
    factors = products.slowdown()
    if max(factors.values(), default=0.0) < _NOTABLE_SLOWDOWN:
        return
    is_int8 = loaded.options.quantization == "int8"
    name = str(loaded.dtype).removeprefix("torch.")
    times = ", ".join(f"{factor:.1f} with {rows}" for rows, factor in factors.items())
    log.warning(
        "%s is slower than float32 on this processor: time of its matrix products divided by that "
        "of float32, by rows in a step: %s",
        "quantization int8" if is_int8 else f"dtype {name}",
        times,
    )


def _listed(names: Iterable[str]) -> str:
    """Lists a few names, and the number of the rest."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return ", ".join(ordered[:4]) + more
