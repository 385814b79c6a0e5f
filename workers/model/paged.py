"""Builds the runner of a decoder whose sequences share a batch: checks it, replaces modules by
faster ones, checks the result, and restores modules that differ."""

import logging
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from workers.engine.model import ModelRefused
from workers.model.backend import Backend, choose_backend
from workers.model.huge_pages import touch, use_huge_pages
from workers.model.int8_weights import num_weight_bytes
from workers.model.kv_cache import KVCache, LayerShape, token_bytes
from workers.model.loaded import Loaded
from workers.model.probe import check_parity, probe_layers
from workers.model.products import Products
from workers.model.proof import difference, find_wrong, record, streamline
from workers.model.runner import ModelRunner
from workers.model.surgery.surgeon import ATTENTION, Operation, Surgeon

log = logging.getLogger(__name__)

# A smaller difference may be noise.
_NOTABLE_SLOWDOWN = 1.15
# Smaller weights fit the CPU's caches.
_LEAST_HUGE_BYTES = 2**24
# Prefaults at most min(512 MiB, 8 × the weights' bytes).
_MOST_READY_BYTES = 2**29
_READY_PER_WEIGHT = 8


def paged_runner(loaded: Loaded, progress: Callable[[str], None]) -> tuple[ModelRunner, Backend]:
    """Raises CannotShareBatch if the model cannot be paged, ModelRefused if it cannot run."""
    weight_bytes = num_weight_bytes(loaded.decoder, "cpu")
    runner, backend = _right_runner(loaded, progress)
    tensors = runner.cache.tensors
    if loaded.options.fused and weight_bytes >= _LEAST_HUGE_BYTES:
        num_bytes = use_huge_pages(tensors)
        progress(f"{num_bytes / 2**20:.0f} MiB lie on huge pages")
    if loaded.device.type == "cpu":
        touch(tensors, min(_MOST_READY_BYTES, _READY_PER_WEIGHT * weight_bytes))
    return runner, backend


def _right_runner(loaded: Loaded, progress: Callable[[str], None]) -> tuple[ModelRunner, Backend]:
    """Tries replaced modules, then without those that differ, then none. Reloads the weights each
    time, as replaced modules change their layout."""
    wrong: set[str] = set()
    for _ in range(2):
        result = _exchanged_runner(loaded, wrong, progress)
        if not isinstance(result, set):
            return result
        wrong = result
        progress(f"taken back, and the weights are read again: {_listed(wrong)}")
        loaded.renew(progress)
    progress("no module is exchanged")
    runner, backend, _ = _untouched_runner(loaded, progress)
    record(runner, loaded.decoder, loaded.config, ())
    return runner, backend


def _exchanged_runner(
    loaded: Loaded, stays: set[str], progress: Callable[[str], None]
) -> tuple[ModelRunner, Backend] | set[str]:
    """Returns a runner, or the names of modules to leave alone. Raises CannotShareBatch if even the
    unmodified model does not run."""
    runner, backend, shapes = _untouched_runner(loaded, progress)
    decoder, config = loaded.decoder, loaded.config
    if not backend.merges:
        record(runner, decoder, config, ())
        return runner, backend
    surgeon = Surgeon(decoder, shapes, runner.cache, backend, stays)
    candidates = surgeon.candidates()
    untouched = record(runner, decoder, config, candidates)
    done = surgeon.operate(candidates, untouched.calls)
    _report(done, len(shapes), backend, progress)
    if backend.layout.products is not None:
        _warn_if_slower(backend.layout.products, loaded)
    if reason := difference(runner, decoder, untouched):
        progress(f"with these the whole model is not what it was: {reason}")
        return find_wrong(runner, decoder, untouched, done.names)
    if streamline(runner, decoder, untouched):
        progress("its layers run as one loop")
    return runner, backend


def _untouched_runner(
    loaded: Loaded, progress: Callable[[str], None]
) -> tuple[ModelRunner, Backend, dict[str, LayerShape]]:
    """A runner with the original modules that pages correctly, and its layers' shapes by name."""
    decoder, options = loaded.decoder, loaded.options
    shapes = probe_layers(decoder, loaded.config, loaded.device)
    cache = _build_cache(loaded, shapes)
    backend = choose_backend(
        options.attention,
        loaded.dtype,
        loaded.device,
        cache.block_size,
        progress,
        fused=options.fused,
        weight_bytes=num_weight_bytes(decoder, "cpu"),
        processor=loaded.processor,
    )
    runner = ModelRunner(
        decoder,
        cache,
        backend.attention,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=loaded.longest(cache.num_blocks),
        device=loaded.device,
        kernels=backend.kernels,
    )
    check_parity(decoder, runner, loaded.config, loaded.device)
    names = {name: shapes[m] for name, m in decoder.named_modules() if m in shapes}
    return runner, backend, names


def _build_cache(loaded: Loaded, shapes: Mapping[nn.Module, LayerShape]) -> KVCache:
    """As many blocks as memory holds, but no more than all sequences could fill."""
    num_bytes, block_size = loaded.kv_bytes, loaded.block_size
    block_bytes = token_bytes(shapes, loaded.dtype) * block_size
    num_blocks = min(num_bytes // block_bytes, loaded.most_blocks)
    needed = 2 * -(-16 // block_size)  # for the probe's two sequences
    if num_blocks < needed:
        raise ModelRefused(
            f"{num_bytes} bytes hold {num_blocks} blocks of KV of {block_bytes} bytes each; "
            f"at least {needed} are needed"
        )
    return KVCache(shapes, num_blocks, block_size, loaded.dtype, loaded.device)


def _report(
    done: Operation, num_layers: int, backend: Backend, progress: Callable[[str], None]
) -> None:
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in done.exchanged.items())
    verb = "merged or packed" if backend.layout.packs else "merged"
    progress(f"{verb} for this processor: {counts or 'nothing'}")
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
    """A few names, and the number of the rest."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return ", ".join(ordered[:4]) + more
