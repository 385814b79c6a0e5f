"""The card of a prefill-only model: what gateways need to know of its vectors and scores."""

from typing import Any

from transformers import PretrainedConfig

from contract.model_cards import PoolingCard
from workers.engine.model import ModelRefused
from workers.model.pooling.folder import Activation, OwnHead, PoolingFolder

_MAX_LABELS = 4096
_PAIR = ("batchway-q", "batchway-d")


def activation_of(found: PoolingFolder, config: PretrainedConfig) -> Activation:
    """A cross-encoder's own, by default a sigmoid of its one score. Of a plain classifier the one
    of transformers' pipelines."""
    if found.activation is not None:
        return found.activation
    if not found.is_cross_encoder and not isinstance(found.steps[0], OwnHead):
        return "none"
    problem = getattr(config, "problem_type", None)
    num_labels = int(getattr(config, "num_labels", 1))
    if not isinstance(found.steps[0], OwnHead) or num_labels == 1:
        return "sigmoid"
    if found.is_cross_encoder or problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" else "softmax"


def make_card(
    found: PoolingFolder,
    config: PretrainedConfig,
    activation: Activation,
    num_outputs: int,
    tokenizer: Any,
) -> PoolingCard:
    """Raises ModelRefused."""
    path = found.files.model_path
    scores = found.is_cross_encoder or isinstance(found.steps[0], OwnHead)
    renders_pairs = _renders_pairs(found, tokenizer) if scores else False
    if found.has_messages and not renders_pairs:
        raise ModelRefused(
            f"{path} renders its inputs with a chat template that has no place for the plain texts "
            "of a query and a document"
        )
    if scores and num_outputs > 1:
        if num_outputs > _MAX_LABELS:
            raise ModelRefused(f"{path} has {num_outputs} labels, over {_MAX_LABELS}")
        names: dict[Any, str] = dict(config.id2label or {})
        labels = tuple(str(names.get(index, f"LABEL_{index}")) for index in range(num_outputs))
        return PoolingCard(
            kind="classifier",
            num_outputs=num_outputs,
            labels=labels,
            activation=activation,
            prompts=dict(found.prompts),
            default_prompt=found.default_prompt,
            renders_pairs=renders_pairs,
        )
    return PoolingCard(
        kind="reranker" if scores else "embedding",
        num_outputs=num_outputs,
        activation=activation,
        dimensions=() if scores else tuple(n for n in found.dimensions if n <= num_outputs),
        prompts=dict(found.prompts),
        default_prompt=found.default_prompt,
        renders_pairs=renders_pairs,
    )


def _renders_pairs(found: PoolingFolder, tokenizer: Any) -> bool:
    """Whether the chat template renders a query and a document, where sentence-transformers would
    use it."""
    if found.has_messages is False or tokenizer.chat_template is None:
        return False
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("query", "document"), _PAIR, strict=True)
    ]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # the template raises, as it may
        return False
    return all(text in str(rendered) for text in _PAIR)
