"""Builds the answers to calls for vectors from a job's log: embeddings, rankings, scores and
classes."""

import base64
import math
import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from contract.events import LogEntry, Tokens
from contract.jobs import Endpoint, Job, cut_tokens

_ID_PREFIXES = {
    Endpoint.EMBEDDINGS: "embd-",
    Endpoint.RERANK: "rerank-",
    Endpoint.SCORE: "score-",
    Endpoint.CLASSIFY: "classify-",
}


class VectorAnswer:
    """A whole answer, built from a job's events. `labels`: those of a classifier."""

    def __init__(self, job: Job, labels: Sequence[str] = ()) -> None:
        assert job.pooling is not None
        self._job = job
        self._pooling = job.pooling
        self._labels = labels
        self._vectors: list[bytes] = [b""] * job.num_prompts

    def reset(self) -> None:
        self._vectors = [b""] * self._job.num_prompts

    def add(self, entry: LogEntry) -> None:
        if isinstance(entry.event, Tokens):
            for delta in entry.event.deltas:
                self._vectors[delta.choice] = delta.vector

    def build(
        self, num_prompt_tokens: int, num_output_tokens: int = 0, num_cached: int = 0
    ) -> dict[str, Any]:
        """The answer, once each prompt has its vector. Output and cached tokens, which it does not
        show, are of a flow's other calls."""
        job = self._job
        assert all(self._vectors), "a job succeeds with all its vectors"
        answer: dict[str, Any] = {"id": _ID_PREFIXES[job.endpoint] + job.id.removeprefix("job-")}
        num_tokens = num_prompt_tokens + num_output_tokens
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "total_tokens": num_tokens,
            **cut_tokens(job),
        }
        if job.endpoint is Endpoint.RERANK:
            return {**answer, "model": job.named_model, "usage": usage, "results": self._ranking()}
        answer |= {"object": "list", "created": job.created_s, "model": job.named_model}
        if job.endpoint is Endpoint.EMBEDDINGS:
            data = [self._embedding(i, vector) for i, vector in enumerate(self._vectors)]
        elif job.endpoint is Endpoint.SCORE:
            scores = enumerate(self._scores())
            data = [{"index": i, "object": "score", "score": score} for i, score in scores]
        else:
            data = [self._class(i, vector) for i, vector in enumerate(self._vectors)]
        return {**answer, "data": data, "usage": usage}

    def _embedding(self, index: int, vector: bytes) -> dict[str, Any]:
        shown: object
        if self._pooling.is_base64:
            shown = base64.b64encode(vector).decode()
        else:
            # Encoded one by one: the JSON of all may take a second, in which nothing else runs.
            shown = msgspec.Raw(msgspec.json.encode(_numbers(vector)))
        return {"object": "embedding", "index": index, "embedding": shown}

    def _ranking(self) -> list[dict[str, Any]]:
        """Returns the documents by falling score."""
        scores = self._scores()
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        documents = self._pooling.documents
        return [
            {
                "index": index,
                **({"document": {"text": documents[index]}} if documents else {}),
                "relevance_score": scores[index],
            }
            for index in order[: self._pooling.top_n]
        ]

    def _scores(self) -> list[float]:
        """The scores: of pairs, the only number of each vector; of queries and documents, the
        cosine of each document with its query, or with the only query."""
        vectors, num_queries = [_numbers(each) for each in self._vectors], self._pooling.num_queries
        if num_queries == 0:
            return [vector[0] for vector in vectors]
        queries, documents = vectors[:num_queries], vectors[num_queries:]
        if num_queries == 1:
            queries *= len(documents)
        return [_cosine(*pair) for pair in zip(queries, documents, strict=True)]

    def _class(self, index: int, vector: bytes) -> dict[str, Any]:
        probs = _numbers(vector)
        best = max(range(len(probs)), key=probs.__getitem__)
        label = self._labels[best] if best < len(self._labels) else f"LABEL_{best}"
        return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}


def num_vector_bytes(entries: Iterable[LogEntry]) -> int:
    """The bytes of all vectors in a log."""
    events = (entry.event for entry in entries if isinstance(entry.event, Tokens))
    return sum(len(delta.vector) for event in events for delta in event.deltas)


def _numbers(vector: bytes) -> list[float]:
    """The numbers of a vector: float32, little-endian."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """The cosine of two vectors; 0 if one of them has no direction."""
    length = math.hypot(*first) * math.hypot(*second)
    return sum(map(operator.mul, first, second)) / length if length else 0.0
