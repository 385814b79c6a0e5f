"""A model's sizes from its config.json alone: transformers builds it without memory for weights."""

import json
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.planning.devices import ITEM_BYTES, Precision
from workers.engine.interface import Chunk, ModelRefused, Padding


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. Weights are counted, not bytes; of a mixture's experts a token uses
    `expert_share`."""

    name: str
    num_body: int  # weights multiplied for each token, without experts
    num_experts: int  # weights of all experts
    expert_share: float
    num_head: int  # multiplied for each sampled token
    num_embedding: int  # held beside them; looked up, not read whole
    num_kv: int  # numbers of KV per token of full attention, over all layers
    windows: tuple[tuple[int, int], ...]  # sliding attention: (numbers of KV per token, window)
    attention_width: int  # query heads * their size * layers
    activation_width: int  # numbers per token that a layer holds while it computes
    max_model_len: int
    vocab_size: int
    precision: Precision  # of the weights, as the configuration has them


def read_shape(path: Path) -> ModelShape:
    """Reads a model's folder or its config.json. Raises ModelRefused."""
    import torch  # takes seconds: who plans from other sizes does without
    from transformers import AutoConfig, AutoModelForCausalLM

    file = path / "config.json" if path.is_dir() else path
    try:
        written = json.loads(file.read_text("utf-8"))
        config = AutoConfig.for_model(**written)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except OSError as exc:
        raise ModelRefused(f"{file} cannot be read: {exc.strerror}") from exc
    except Exception as exc:  # transformers assumes well-formed files
        raise ModelRefused(f"{file} describes no decoder that transformers knows: {exc}") from exc
    try:
        return _shape(model, config.get_text_config(), written, file)
    except (AttributeError, TypeError, ValueError) as exc:
        raise ModelRefused(f"{file} has no attention over a KV cache: {exc}") from exc


def _shape(model: Any, config: Any, written: dict[str, Any], file: Path) -> ModelShape:
    from workers.model.checkpoint import layer_configs

    kinds: Seq[str] = getattr(config, "layer_types", None) or ()
    kinds = kinds or ("full_attention",) * config.num_hidden_layers
    layers = layer_configs(config)
    layers *= len(kinds) // len(layers)
    num_keeping = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    kept: Counter[int] = Counter()  # numbers of KV per token, by window; 0: full attention
    attention_width = 0
    for number, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        if "linear" in kind:
            continue
        attention_width += layer.num_attention_heads * _head_dim(layer)
        if number < num_keeping:  # the others attend to what earlier ones keep
            is_sliding = kind == "sliding_attention"
            kept[(is_sliding and getattr(layer, "sliding_window", None)) or 0] += _num_kv(layer)
    inner = [getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size for layer in layers]
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    is_expert = {id(p) for name, p in model.named_parameters() if ".experts." in name}
    body = [p for p in model.parameters() if p is not embedding and p is not head]
    num_experts = sum(p.numel() for p in body if id(p) in is_expert)
    return ModelShape(
        name=file.parent.resolve().name if file.name == "config.json" else file.stem,
        num_body=sum(p.numel() for p in body) - num_experts,
        num_experts=num_experts,
        expert_share=_expert_share(config) if num_experts else 1.0,
        num_head=head.numel(),
        num_embedding=0 if head is embedding else embedding.numel(),
        num_kv=kept[0],
        windows=tuple((num_kv, window) for window, num_kv in kept.items() if window),
        attention_width=attention_width,
        # Gemma 3n lists a size for each layer.
        activation_width=6 * layers[0].hidden_size
        + 3 * max(max(each) if isinstance(each, list) else each for each in inner),
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        precision=_precision(written),
    )


def _head_dim(layer: Any) -> int:
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def _num_kv(layer: Any) -> int:
    """Numbers of KV that a layer keeps for a token."""
    if latent := getattr(layer, "kv_lora_rank", None):  # multi-head latent attention
        return int(latent + layer.qk_rope_head_dim)
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return 2 * int(heads) * _head_dim(layer)


def _expert_share(config: Any) -> float:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    counts = [found for name in names if (found := getattr(config, name, None))]
    return float(config.num_experts_per_tok / (counts[0] if counts else config.num_experts))


def _precision(written: dict[str, Any]) -> Precision:
    """The configuration's, if it is one of those known."""
    method = (written.get("quantization_config") or {}).get("quant_method")
    name = written.get("dtype") or written.get("torch_dtype")
    known: dict[Any, Precision] = {name: name for name in ITEM_BYTES}
    return "fp8" if method in ("fp8", "compressed-tensors") else known.get(name, "bfloat16")


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model in a precision: bytes, and what a step reads and computes. The head stays in two
    bytes where the rest has one, as quantised checkpoints have it."""

    shape: ModelShape
    precision: Precision
    kv_item_bytes: int

    @property
    def weight_bytes(self) -> int:
        shape, item = self.shape, ITEM_BYTES[self.precision]
        rest = shape.num_head + shape.num_embedding
        return item * (shape.num_body + shape.num_experts) + max(2, item) * rest

    def kv_bytes(self, num_tokens: int) -> int:
        """Of one sequence."""
        shape = self.shape
        sliding = sum(n * min(num_tokens, window) for n, window in shape.windows)
        return self.kv_item_bytes * (shape.num_kv * num_tokens + sliding)

    def activation_bytes(self, step_tokens: int) -> int:
        return step_tokens * max(2, ITEM_BYTES[self.precision]) * self.shape.activation_width

    def demand(self, chunks: Seq[Chunk | Padding]) -> tuple[float, float, float]:
        """A step's bytes read, operations in the weights' precision, and operations in two bytes:
        the head's and attention's. It reads the weights once and each sequence's KV once."""
        shape, item = self.shape, ITEM_BYTES[self.precision]
        tokens = sum(chunk.num_tokens for chunk in chunks)
        rows = sum(isinstance(chunk, Padding) or chunk.samples for chunk in chunks)
        # Experts that no token chooses are not read (tokens choose independently).
        touched = 1.0 - (1.0 - shape.expert_share) ** tokens if shape.expert_share < 1.0 else 1.0
        read = item * (shape.num_body + touched * shape.num_experts) + max(2, item) * shape.num_head
        read += sum(self.kv_bytes(chunk.start + chunk.num_tokens) for chunk in chunks)
        pairs = sum(c.num_tokens * (c.start + (c.num_tokens + 1) / 2) for c in chunks)
        products = (shape.num_body + shape.expert_share * shape.num_experts) * tokens
        in_two_bytes = 2.0 * shape.num_head * rows + 4.0 * shape.attention_width * pairs
        return read, 2.0 * products, in_two_bytes
