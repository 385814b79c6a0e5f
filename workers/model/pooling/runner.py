"""Runs a step of a prefill-only model: whole prompts in, vectors out. An engine's Model.

At loading, the results of several texts together are compared with those of each text alone,
which transformers' own code computes.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from workers.engine.interface import Chunk, ModelRefused, Padding, Row, RowFailed, Vector
from workers.engine.masks import StepMasks
from workers.model.checkpoint import first_line
from workers.model.pooling.encoders import (
    Encoder,
    FlatEncoder,
    PaddedEncoder,
    Text,
    fixed_arguments,
)
from workers.model.pooling.folder import Activation
from workers.model.pooling.heads import Heads
from workers.model.weights import share_attention, use_own_attention

# The largest part of the tokens that a worker holds is one step's, the rest waits for the next.
_NUM_STEPS_HELD = 4


class PoolingRunner:
    """An encoder and its head. A prompt's vector depends on the prompt alone, up to rounding."""

    def __init__(
        self,
        encoder: Encoder,
        head: Callable[[Tensor, Seq[Text]], Tensor],
        *,
        activation: Activation,
        is_normalized: bool,
        max_model_len: int,
        num_step_tokens: int,
        examples: Seq[Text] = (),
    ) -> None:
        """`is_normalized`: a vector that is cut to fewer dimensions is normalised again.
        `examples`: random texts, or pairs if the model tells the two of a pair by their types."""
        self.block_size = 16  # tokens; blocks are only counted
        self.shares_blocks = False
        self.num_state_slots = 0
        self.eos_token_ids = frozenset[int]()
        self.encoder = encoder
        self.examples = examples
        self._head = head
        self._activation = activation
        self._is_normalized = is_normalized
        self.max_model_len = max_model_len
        self.tokens_per_s = 0.0  # of a full step; 0: not measured
        num_tokens = _NUM_STEPS_HELD * max(num_step_tokens, max_model_len)
        self.num_blocks = -(-num_tokens // self.block_size)

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        """Runs a step. Padding is not computed: no batch is a rectangle here."""
        assert masks is None, "a prefill-only model samples nothing"
        if not chunks:
            return []
        sequences = [chunk.sequence for chunk in chunks]
        assert all(chunk.num_tokens == chunk.sequence.num_known for chunk in chunks)
        vectors = self.compute([Text(s.token_ids, s.num_first_part) for s in sequences])
        is_finite = vectors.isfinite().all(dim=1).tolist()
        return [
            self._row(vector, sequence.num_dimensions)
            if finite
            else RowFailed("the model computed no finite vector")
            for vector, sequence, finite in zip(vectors, sequences, is_finite, strict=True)
        ]

    @torch.inference_mode()
    def compute(self, texts: Seq[Text]) -> Tensor:
        """(number of texts, dimensions) in float32, on the CPU."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].token_ids))
        ordered = [texts[index] for index in order]
        vectors = self._head(self.encoder.encode(ordered), ordered).float()
        match self._activation:
            case "sigmoid":
                vectors = vectors.sigmoid()
            case "softmax":
                vectors = vectors.softmax(dim=1)
        out = torch.empty(vectors.shape)
        out[torch.tensor(order)] = vectors.cpu()
        return out

    def measure_rate(self, text: Text, num_tokens: int) -> int:
        """Computes `num_tokens` of one text twice and times the second. Returns vectors' size."""
        texts = [text] * -(-num_tokens // len(text.token_ids))
        vectors = self.compute(texts)
        started_s = time.perf_counter()
        self.compute(texts)
        seconds = time.perf_counter() - started_s
        self.tokens_per_s = len(texts) * len(text.token_ids) / seconds
        return vectors.shape[1]

    def _row(self, vector: Tensor, num_dimensions: int) -> Vector:
        if 0 < num_dimensions < len(vector):
            vector = vector[:num_dimensions]
            if self._is_normalized:
                vector = F.normalize(vector, dim=0)
        return Vector(vector.numpy().astype("<f4").tobytes())


_LENGTHS = (1, 2, 7, 7, 19, 40)  # tokens
# The largest difference of a vector from the one alone, as a share of its length.
MAX_ERROR = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


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
        self._max_error = MAX_ERROR[dtype]
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
                error = self.error(encoder.encode(self.texts), alone)
            except Exception as exc:  # transformers' code meets arguments that it does not expect
                reason = first_line(exc)
            else:
                if error <= self._max_error:
                    return encoder
                reason = f"flat texts differ from each alone by {error:.1g}"
            use_own_attention(model)
        encoder = PaddedEncoder(model, self._device, uses_types=uses_types, pad_id=self._pad_id)
        error = self.error(encoder.encode(self.texts), alone)
        if not error <= self._max_error:
            raise ModelRefused(f"a text's vector depends on the texts beside it, by {error:.1g}")
        progress(f"texts are padded: {reason}")
        return encoder

    @torch.inference_mode()
    def check_head(self, head: Heads, encoder: Encoder, expected: Tensor, path: str) -> None:
        """Raises ModelRefused unless the classifier behind the encoder is the model's own."""
        error = self.error(head(encoder.encode(self.texts), self.texts), expected)
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
    def error(found: Tensor, expected: Tensor) -> float:
        """The largest distance of two rows, as a share of the expected row's length."""
        lengths = expected.float().norm(dim=1).clamp(min=1e-6)
        return float(((found.float() - expected.float()).norm(dim=1) / lengths).max())
