"""The endpoints of calls, which define the formats of answers."""

from enum import StrEnum


class Endpoint(StrEnum):
    """The HTTP endpoint that defines the format of the job's response."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    SCORE = "/v1/score"
    CLASSIFY = "/v1/classify"
    RESPONSES = "/v1/responses"


VECTOR_ENDPOINTS = frozenset(
    {Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE, Endpoint.CLASSIFY}
)
