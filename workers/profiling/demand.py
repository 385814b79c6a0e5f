"""Lower bounds of the bytes and operations of a step, from the model's tensors."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workers.engine.interface import Chunk
from workers.model.native.kernels import Panels
from workers.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes. All experts of a mixture count, although a step uses only some."""

    weight_bytes: int  # read in a step: all but the embedding
    num_body_weights: int  # multiplied for each token
    num_head_weights: int  # multiplied for each sampled row
    kv_bytes_per_token: int
    attention_width: int  # query heads * their size * layers


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes read and floating-point operations of one step."""

    num_bytes: int
    flops: int


def shape_of(runner: ModelRunner) -> Shape:
    """A decoder's sizes. Raises AttributeError for a model that is not a transformers decoder."""
    decoder: Any = runner._decoder
    seen: set[int] = set()
    head = decoder.get_output_embeddings()
    num_head, head_bytes = (0, 0) if head is None else _count([head], seen)
    modules = [m for m in decoder.modules() if not isinstance(m, nn.Embedding)]
    num_body, body_bytes = _count(modules, seen)
    layers = list(runner.cache.layers.values())
    itemsize = layers[0].keys.dtype.itemsize
    elements = sum(layer.keys[0, 0].numel() + layer.values[0, 0].numel() for layer in layers)
    config = decoder.config.get_text_config()
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return Shape(
        body_bytes + head_bytes,
        num_body,
        num_head,
        elements * itemsize,
        config.num_attention_heads * head_dim * len(layers),
    )


def demand_of(shape: Shape, chunks: Seq[Chunk]) -> Demand:
    """A step's demand: it reads the weights once and each sequence's KV once."""
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    num_rows = sum(chunk.samples for chunk in chunks)
    num_context = sum(chunk.start + chunk.num_tokens for chunk in chunks)
    # Each token attends to those before it and to itself.
    num_pairs = sum(c.num_tokens * c.start + c.num_tokens * (c.num_tokens + 1) // 2 for c in chunks)
    products = shape.num_body_weights * num_tokens + shape.num_head_weights * num_rows
    return Demand(
        shape.weight_bytes + shape.kv_bytes_per_token * num_context,
        2 * products + 4 * shape.attention_width * num_pairs,
    )


def _count(modules: Seq[nn.Module], seen: set[int]) -> tuple[int, int]:
    """Returns elements and bytes of the modules' own matrices; shared tensors count once."""
    own = [tensor for module in modules for tensor in _tensors(module)]
    found = {id(t): t for t in own if t.dim() > 1 and id(t) not in seen}.values()
    seen.update(map(id, found))
    num_elements = sum(tensor.numel() for tensor in found)
    return num_elements, sum(tensor.numel() * tensor.dtype.itemsize for tensor in found)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields parameters, and other tensors of batchway's own modules, packed or not."""
    yield from module.parameters(recurse=False)
    for value in vars(module).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Panels):
            yield value.weights
