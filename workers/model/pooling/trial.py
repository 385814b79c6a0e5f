"""Tries how a prefill-only model can be computed: compares the results of several texts together
with those of each text alone, computed by transformers' own code."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from workers.engine.interface import ModelRefused
from workers.model.checkpoint import first_line
from workers.model.pooling.encoders import (
    Encoder,
    FlatEncoder,
    PaddedEncoder,
    Text,
    fixed_arguments,
)
from workers.model.pooling.heads import Heads
from workers.model.weights import share_attention, use_own_attention

_LENGTHS = (1, 2, 7, 7, 19, 40)  # tokens
# The largest difference of a vector from the one alone, as a share of its length.
_MAX_ERROR = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Trial:
    """Random texts of several lengths, together and each alone."""

    def __init__(
        self,
        model: Any,
        config: PretrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        longest: int,
        *,
        uses_types: bool,
    ) -> None:
        self._model = model
        self._device = device
        self._max_error = _MAX_ERROR[dtype]
        self._uses_types = uses_types
        text_config = config.get_text_config()
        pad_id = text_config.pad_token_id
        self._pad_id = pad_id if isinstance(pad_id, int) and pad_id >= 0 else 0
        window = getattr(text_config, "sliding_window", None)
        lengths = [*_LENGTHS, *([window + 9] if isinstance(window, int) else [])]
        generator = torch.Generator().manual_seed(0)
        self.texts = []
        for length in sorted(min(length, longest) for length in lengths):
            ids = torch.randint(int(text_config.vocab_size), (length,), generator=generator)
            ids[ids == self._pad_id] = (self._pad_id + 1) % int(text_config.vocab_size)
            num_first = math.ceil(length / 2) if uses_types else 0
            self.texts.append(Text(ids.tolist(), num_first))

    @torch.inference_mode()
    def alone_logits(self, whole: Any) -> Tensor:
        """(number of texts, labels), by the model's own forward."""
        return torch.cat([whole(**self._alone(whole, text)).logits for text in self.texts]).float()

    @torch.inference_mode()
    def choose_encoder(self, progress: Callable[[str], None]) -> Encoder:
        """The first encoder with equal results. Raises ModelRefused if even padded texts differ."""
        model, uses_types = self._model, self._uses_types
        alone = torch.cat(
            [
                model(**self._alone(model, text)).last_hidden_state.flatten(0, 1)
                for text in self.texts
            ]
        )
        encoder: Encoder
        reason = "its family has no shared attention"
        if share_attention(model):
            encoder = FlatEncoder(model, self._device, uses_types=uses_types)
            try:
                error = self._error(encoder.encode(self.texts), alone)
            except Exception as exc:  # transformers' code meets arguments that it does not expect
                reason = first_line(exc)
            else:
                if error <= self._max_error:
                    return encoder
                reason = f"flat texts differ from each alone by {error:.1g}"
            use_own_attention(model)
        encoder = PaddedEncoder(model, self._device, uses_types=uses_types, pad_id=self._pad_id)
        error = self._error(encoder.encode(self.texts), alone)
        if not error <= self._max_error:
            raise ModelRefused(f"a text's vector depends on the texts beside it, by {error:.1g}")
        progress(f"texts are padded: {reason}")
        return encoder

    @torch.inference_mode()
    def check_head(self, head: Heads, encoder: Encoder, expected: Tensor, path: str) -> None:
        """Raises ModelRefused unless the classifier behind the encoder is the model's own."""
        error = self._error(head(encoder.encode(self.texts), self.texts), expected)
        if not error <= self._max_error:
            raise ModelRefused(f"the classifier of {path} cannot be computed behind its encoder")

    def _alone(self, model: Any, text: Text) -> dict[str, Any]:
        ids = torch.tensor([list(text.token_ids)], device=self._device)
        arguments = fixed_arguments(model) | {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
        }
        if self._uses_types:
            arguments["token_type_ids"] = torch.tensor([text.type_ids], device=self._device)
        return arguments

    @staticmethod
    def _error(found: Tensor, expected: Tensor) -> float:
        """The largest distance of two rows, as a share of the expected row's length."""
        lengths = expected.float().norm(dim=1).clamp(min=1e-6)
        return float(((found.float() - expected.float()).norm(dim=1) / lengths).max())
