"""Loads a prefill-only model, and makes the card that tells gateways of its vectors and scores. Its
texts are computed flat if a trial shows that this changes nothing, else padded."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from contract.model_cards import PoolingCard, TokenizerFiles
from workers.engine.interface import ModelRefused
from workers.model.checkpoint import context_length
from workers.model.memory import card_of, kv_bytes_in_share
from workers.model.pooling.encoders import Text, first_position
from workers.model.pooling.folder import Activation, ClassifierStep, PoolingFolder
from workers.model.pooling.heads import Heads
from workers.model.pooling.runner import PoolingRunner, Trial
from workers.model.rope import fix_rope
from workers.model.weights import load_pooling_model, told_weights

# On a CPU larger steps are no faster, and others wait longer. The GPU's is a guess.
CPU_STEP_TOKENS = 1024
GPU_STEP_TOKENS = 16_384

_AUTO_CLASSES: dict[str, Any] = {
    "feature-extraction": AutoModel,
    "sequence-classification": AutoModelForSequenceClassification,
    "text-generation": AutoModelForCausalLM,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model is computed, in which type, and in which share of the device's memory."""

    device: torch.device
    dtype: torch.dtype
    memory_share: float | None = None


def load_runner(
    found: PoolingFolder,
    path: str,
    config: PretrainedConfig,
    place: Place,
    tokenizer: TokenizerFiles,
    progress: Callable[[str], None],
    *,
    max_model_len: int | None,
    num_step_tokens: int | None,
) -> tuple[PoolingRunner, PoolingCard, TokenizerFiles]:
    """Returns the model as an engine runs it, its card, and the tokenizer files to publish. `path`:
    of config.json and the weights. Raises ModelRefused."""
    revision = found.files.revision
    with told_weights(progress):
        whole = load_pooling_model(
            _AUTO_CLASSES[found.task], path, config, place.dtype, place.device, revision
        )
    weight_bytes = sum(tensor.nbytes for tensor in chain(whole.parameters(), whole.buffers()))
    model = whole if found.task == "feature-extraction" else getattr(whole, whole.base_model_prefix)
    fast = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    longest = _longest(found, config, model, fast, max_model_len)
    fix_rope(model, longest)
    files = _published(tokenizer, lowercases=found.lowercases)
    uses_types = _uses_types(model, config, fast)
    trial = Trial(model, config, place.device, place.dtype, longest, uses_types=uses_types)
    expected = trial.alone_logits(whole) if isinstance(found.steps[0], ClassifierStep) else None
    progress("trying several texts in one step")
    encoder = trial.choose_encoder(progress)
    heads = Heads(found, whole, model)
    if expected is not None:
        trial.check_head(heads, encoder, expected, path)
    activation = activation_of(found, config)
    num_step_tokens = num_step_tokens or default_step_tokens(place.device)
    runner = PoolingRunner(
        encoder,
        heads,
        activation=activation,
        is_normalized=found.is_normalized,
        max_model_len=longest,
        num_step_tokens=num_step_tokens,
        examples=trial.texts,
    )
    step_bytes = _largest_step(runner, trial.texts[-1], num_step_tokens, place.device)
    _check_share(place, weight_bytes, step_bytes)
    num_outputs = runner.measure_rate(trial.texts[-1], num_step_tokens)
    card = make_card(found, config, activation, num_outputs, fast)
    return runner, card, files


def default_step_tokens(device: torch.device) -> int:
    return CPU_STEP_TOKENS if device.type == "cpu" else GPU_STEP_TOKENS


def _largest_step(
    runner: PoolingRunner, text: Text, num_step_tokens: int, device: torch.device
) -> int | None:
    """Returns the bytes of a GPU's memory that a full step of the longest texts takes; None on a
    CPU, where it is not measured. Raises ModelRefused if the GPU has less."""
    card, longest = card_of(device), runner.max_model_len
    if card is None:
        return None
    ids = (list(text.token_ids) * -(-longest // len(text.token_ids)))[:longest]
    texts = [Text(ids, text.num_first)] * max(1, num_step_tokens // longest)

    def compute() -> None:
        runner.compute(texts)

    try:
        return card.peak_bytes(compute)
    except torch.OutOfMemoryError as exc:
        raise ModelRefused(
            f"the memory of {device} does not hold a step of {len(texts)} text(s) of {longest} "
            "tokens beside the weights; a lower max_model_len or max_num_batched_tokens may fit"
        ) from exc


def _check_share(place: Place, weight_bytes: int, step_bytes: int | None) -> None:
    """Raises ModelRefused if weights and the largest step exceed the worker's share of memory."""
    if place.memory_share is not None:
        kv_bytes_in_share(
            place.memory_share,
            place.device,
            weight_bytes=weight_bytes,
            least_bytes=0,
            step_bytes=step_bytes,
        )


def _longest(
    found: PoolingFolder,
    config: PretrainedConfig,
    model: Any,
    tokenizer: Any,
    asked: int | None,
) -> int:
    """The most tokens of a text: the operator's limit, or the model's and its tokenizer's."""
    own = context_length(config)
    limits = [] if own is None else [own - first_position(model)]
    trained = found.max_tokens or tokenizer.model_max_length
    if trained < 10**9:  # transformers has a huge number for none
        limits.append(int(trained))
    if asked is not None and (asked < 1 or asked > min(limits, default=asked)):
        raise ModelRefused(
            f"max_model_len {asked} is not within the model's {min(limits)} positions"
        )
    return asked or min(limits, default=8192)


def _uses_types(model: Any, config: PretrainedConfig, tokenizer: Any) -> bool:
    """Whether the model tells the two texts of a pair by their type."""
    takes = "token_type_ids" in inspect.signature(model.forward).parameters
    has_types = (getattr(config, "type_vocab_size", 0) or 0) > 1
    return takes and has_types and "token_type_ids" in tokenizer.model_input_names


def _published(files: TokenizerFiles, *, lowercases: bool) -> TokenizerFiles:
    """Returns the files without truncation and padding, so that gateways see every token."""
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    normalizer = tokenizer.normalizer
    if lowercases and not isinstance(normalizer, Lowercase):
        steps = [Lowercase(), *([] if normalizer is None else [normalizer])]
        tokenizer.normalizer = NormalizerSequence(steps)
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=files.chat_template,
        special_tokens=files.special_tokens,
    )


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
