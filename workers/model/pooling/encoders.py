"""Computes the vectors of the tokens of several texts: flat, without padding, or padded.

Both give the same as each text alone, up to rounding; `loading` tries which of them does.
"""

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model.attention.interface import STEP_KEYWORD, AttentionCall, CannotShareBatch

_MAX_PADDING = 1.25  # of a padded batch: longest text to shortest


@dataclass(frozen=True, slots=True)
class Text:
    """The token ids of a text or pair; the first `num_first` are of the first text of a pair."""

    token_ids: Seq[int]
    num_first: int = 0

    @property
    def type_ids(self) -> list[int]:
        num_second = len(self.token_ids) - self.num_first if self.num_first else 0
        return [0] * (len(self.token_ids) - num_second) + [1] * num_second


def runs_of_equal_length(lengths: Seq[int]) -> Iterator[tuple[int, int, int]]:
    """Each run of equal lengths: its first row, its number of texts, their length."""
    first = 0
    for length, run in groupby(lengths):
        num_texts = len(list(run))
        yield first, num_texts, length
        first += num_texts * length


class Encoder(Protocol):
    def encode(self, texts: Seq[Text]) -> Tensor:
        """Texts in order of length -> the rows that a head takes."""


class FlatEncoder:
    """Computes all tokens in one row; each attends within its own text."""

    def __init__(self, model: Any, device: torch.device, *, uses_types: bool) -> None:
        self._model = model
        self._device = device
        self._uses_types = uses_types
        self._first_position = first_position(model)
        self._fixed = fixed_arguments(model)

    def encode(self, texts: Seq[Text]) -> Tensor:
        """Texts in order of length -> (T, H): the rows of all T tokens, text by text."""
        lengths = [len(text.token_ids) for text in texts]
        first = self._first_position
        positions = chain.from_iterable(range(first, first + length) for length in lengths)
        arguments = self._fixed | {
            "input_ids": self._row(chain.from_iterable(text.token_ids for text in texts)),
            "position_ids": self._row(positions),
            STEP_KEYWORD: FlatStep(lengths),
        }
        if self._uses_types:
            type_ids = chain.from_iterable(text.type_ids for text in texts)
            arguments["token_type_ids"] = self._row(type_ids)
        hidden: Tensor = self._model(**arguments).last_hidden_state
        return hidden[0]

    def _row(self, numbers: Any) -> Tensor:
        return torch.tensor([list(numbers)], device=self._device)


class FlatStep:
    """The attention of one forward over several texts of these lengths: an AttentionStep. Equal
    lengths that follow each other are computed in one call."""

    def __init__(self, lengths: Seq[int]) -> None:
        self._lengths = lengths
        self._masks: dict[tuple[int, int, bool], Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        flags = call.flags
        if flags.softcap is not None or flags.sinks is not None:
            raise CannotShareBatch("its attention has a softcap or sinks")
        given = call.extra.get("is_causal")
        is_causal = bool(getattr(call.module, "is_causal", True) if given is None else given)
        num_heads = call.query.shape[1]
        out = call.query.new_empty(call.query.shape[0], num_heads, call.value.shape[2])
        for first, num_texts, length in runs_of_equal_length(self._lengths):
            rows = slice(first, first + num_texts * length)
            mask = None
            if flags.window is not None and length > flags.window:
                mask = self._mask(length, flags.window, is_causal, call.query.device)
            query, key, value = (
                tensor[rows].view(num_texts, length, *tensor.shape[1:]).transpose(1, 2)
                for tensor in (call.query, call.key, call.value)
            )
            part = F.scaled_dot_product_attention(
                query,
                key,
                value,
                mask,
                is_causal=is_causal and mask is None,
                scale=flags.scale,
                enable_gqa=key.shape[1] != num_heads,
            )
            out[rows].view(num_texts, length, num_heads, -1).copy_(part.transpose(1, 2))
        return out

    def _mask(self, length: int, window: int, is_causal: bool, device: torch.device) -> Tensor:
        """(length, length): True for pairs of a query and a key less than `window` away."""
        key = (length, window, is_causal)
        if key not in self._masks:
            positions = torch.arange(length, device=device)
            distances = positions[:, None] - positions[None, :]
            lowest = 0 if is_causal else 1 - window
            self._masks[key] = (distances < window) & (distances >= lowest)
        return self._masks[key]


class PaddedEncoder:
    """Computes batches of similar lengths, padded on the right, by transformers' attention."""

    def __init__(self, model: Any, device: torch.device, *, uses_types: bool, pad_id: int) -> None:
        self._model = model
        self._device = device
        self._uses_types = uses_types
        self._pad_id = pad_id
        self._fixed = fixed_arguments(model)

    def encode(self, texts: Seq[Text]) -> Tensor:
        """As `FlatEncoder.encode`."""
        parts, batch = [], list(texts[:1])
        for text in texts[1:]:
            if len(text.token_ids) > _MAX_PADDING * len(batch[0].token_ids):
                parts.append(self._encode_batch(batch))
                batch = []
            batch.append(text)
        return torch.cat([*parts, self._encode_batch(batch)])

    def _encode_batch(self, texts: Seq[Text]) -> Tensor:
        longest = len(texts[-1].token_ids)

        def rectangle(rows: Seq[Seq[int]], filler: int) -> Tensor:
            padded = [[*row, *[filler] * (longest - len(row))] for row in rows]
            return torch.tensor(padded, device=self._device)

        mask = rectangle([[1] * len(text.token_ids) for text in texts], 0)
        arguments = self._fixed | {
            "input_ids": rectangle([text.token_ids for text in texts], self._pad_id),
            "attention_mask": mask,
        }
        if self._uses_types:
            arguments["token_type_ids"] = rectangle([text.type_ids for text in texts], 0)
        hidden: Tensor = self._model(**arguments).last_hidden_state
        return hidden[mask.bool()]


def first_position(model: nn.Module) -> int:
    """The position of a text's first token: RoBERTa and its kin count from the padding's row of the
    position table on."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def fixed_arguments(model: Any) -> dict[str, Any]:
    """Arguments of each forward: decoders would otherwise fill a cache."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} if takes_cache else {}
