"""Runs a step of a prefill-only model: whole prompts in, vectors out. An engine's Model."""

import time
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.interface import Chunk, Padding, Row, RowFailed, Vector
from workers.engine.masks import StepMasks
from workers.model.pooling.encoders import Encoder, Text
from workers.model.pooling.folder import Activation
from workers.model.pooling.heads import Heads

# The largest part of the tokens that a worker holds is one step's, the rest waits for the next.
_NUM_STEPS_HELD = 4


class PoolingRunner:
    """An encoder and its head. A prompt's vector depends on the prompt alone, up to rounding."""

    def __init__(
        self,
        encoder: Encoder,
        head: Heads,
        *,
        activation: Activation,
        is_normalized: bool,
        max_model_len: int,
        num_step_tokens: int,
    ) -> None:
        """`is_normalized`: a vector that is cut to fewer dimensions is normalised again."""
        self.block_size = 16  # tokens; blocks are only counted
        self.shares_blocks = False
        self.runs_ahead = False
        self.eos_token_ids = frozenset[int]()
        self.encoder = encoder
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
