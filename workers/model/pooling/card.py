"""The card of a prefill-only model: what gateways need to know of its vectors and scores."""

from typing import Any

from transformers import PretrainedConfig

from contract.model_cards import PoolingCard
from workers.engine.interface import ModelRefused
from workers.model.pooling.folder import Activation, ClassifierStep, PoolingFolder

_MAX_LABELS = 4096
_PAIR = ("batchway-q", "batchway-d")


def activation_of(found: PoolingFolder, config: PretrainedConfig) -> Activation:
    """A cross-encoder's own activation, by default a sigmoid of its one score. Other classifiers,
    and cross-encoders with several labels and none of their own, have transformers'."""
    own = found.activation
    if not isinstance(found.steps[0], ClassifierStep):
        return own or ("sigmoid" if found.is_cross_encoder else "none")
    num_labels = int(getattr(config, "num_labels", 1))
    if found.is_cross_encoder and (num_labels == 1 or own not in (None, "none")):
        return own or "sigmoid"
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def make_card(
    found: PoolingFolder,
    config: PretrainedConfig,
    activation: Activation,
    num_outputs: int,
    tokenizer: Any,
) -> PoolingCard:
    """Returns the model's card. Raises ModelRefused."""
    path = found.files.model_path
    scores = found.is_cross_encoder or isinstance(found.steps[0], ClassifierStep)
    renders_pairs = _renders_pairs(found, tokenizer) if scores else False
    if found.has_messages and not renders_pairs:
        raise ModelRefused(
            f"{path} renders its inputs with a chat template that has no place for the plain texts "
            "of a query and a document"
        )
    is_classifier = scores and num_outputs > 1
    return PoolingCard(
        kind="classifier" if is_classifier else "reranker" if scores else "embedding",
        num_outputs=num_outputs,
        labels=_labels(found, config, num_outputs),
        activation=activation,
        dimensions=() if scores else tuple(n for n in found.dimensions if n <= num_outputs),
        prompts=dict(found.prompts),
        default_prompt=found.default_prompt,
        renders_pairs=renders_pairs,
        needs_pairs=is_classifier and found.is_cross_encoder,
    )


def _labels(found: PoolingFolder, config: PretrainedConfig, num_outputs: int) -> tuple[str, ...]:
    """The labels of several scores, or of one that a single text has. Raises ModelRefused."""
    scores_texts = isinstance(found.steps[0], ClassifierStep) and not found.is_cross_encoder
    if not scores_texts and not (found.is_cross_encoder and num_outputs > 1):
        return ()
    if num_outputs > _MAX_LABELS:
        raise ModelRefused(f"{found.files.model_path} has {num_outputs} labels, over {_MAX_LABELS}")
    names: dict[Any, str] = dict(config.id2label or {})
    return tuple(str(names.get(index, f"LABEL_{index}")) for index in range(num_outputs))


def _renders_pairs(found: PoolingFolder, tokenizer: Any) -> bool:
    """Whether the chat template renders a query and a document, as sentence-transformers does."""
    if found.has_messages is False or tokenizer.chat_template is None:
        return False
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("query", "document"), _PAIR, strict=True)
    ]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template may raise
        return False
    return all(text in str(rendered) for text in _PAIR)
