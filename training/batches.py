"""Batches of documents of similar length, as tensors."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from training.documents import Document, Holes, draw_document
from training.tokenizer import PAD_ID

_BUCKETS = (24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 2048)
"""Documents up to one of these lengths share a batch, so that little of it is padding."""

_NOT_LEARNED = -100  # ignored by cross_entropy


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, labels (the next token, or -100) and positions, each [documents, tokens]."""

    token_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor


def batches(
    seed: int, num_tokens: int, holes: Holes, *, max_document_tokens: int = 2048
) -> Iterator[Batch]:
    """Endless batches of at most `num_tokens` tokens, or of one document that is longer."""
    rng = random.Random(seed)
    waiting: dict[int, list[Document]] = {length: [] for length in _BUCKETS}
    while True:
        document = draw_document(rng, holes)
        if len(document.token_ids) > max_document_tokens:
            continue
        bucket = next(size for size in _BUCKETS if len(document.token_ids) <= size)
        documents = waiting[bucket]
        longest = max(len(d.token_ids) for d in (*documents, document))
        if documents and longest * (len(documents) + 1) > num_tokens:
            yield collate(documents)
            waiting[bucket] = [document]
        else:
            documents.append(document)


def collate(documents: list[Document]) -> Batch:
    """Pads documents on the right, which changes nothing under a causal mask."""
    width = max(len(d.token_ids) for d in documents)
    token_ids = torch.full((len(documents), width), PAD_ID)
    labels = torch.full((len(documents), width), _NOT_LEARNED)
    positions = torch.zeros((len(documents), width), dtype=torch.long)
    for row, document in enumerate(documents):
        ids = torch.tensor(document.token_ids)
        is_learned = torch.tensor(document.is_learned)
        token_ids[row, : len(ids)] = ids
        labels[row, : len(ids) - 1] = torch.where(is_learned, ids, _NOT_LEARNED)[1:]
        positions[row, : len(ids)] = torch.tensor(document.positions)
    return Batch(token_ids, labels, positions)
