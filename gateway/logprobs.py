"""Log probabilities in the shapes of OpenAI's two endpoints."""

import math
from collections.abc import Sequence
from typing import Any

from contract.events import TokenLogprob
from gateway.tokens import ModelTokenizer

_LEAST = -9999.0  # OpenAI's figure for a token that is out of the question; JSON has no -inf


def chat_logprobs(tokenizer: ModelTokenizer, items: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            **_chat_token(tokenizer, item.token_id, item.logprob),
            "top_logprobs": [_chat_token(tokenizer, *pair) for pair in item.top],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: ModelTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode(errors="replace"),
        "bytes": list(raw),
        "logprob": _finite(logprob),
    }


def completion_logprobs(
    tokenizer: ModelTokenizer, items: Sequence[TokenLogprob], offset: int
) -> tuple[dict[str, Any], int]:
    """The object, and the offset (in characters) at which the next token's text starts."""
    texts: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float]] = []
    for item in items:
        texts.append(_text(tokenizer, item.token_id))
        offsets.append(offset)
        offset += len(texts[-1])
        top = {_text(tokenizer, token_id): _finite(logprob) for token_id, logprob in item.top}
        tops.append({texts[-1]: _finite(item.logprob)} | top)
    shape = {
        "text_offset": offsets,
        "token_logprobs": [_finite(item.logprob) for item in items],
        "tokens": texts,
        "top_logprobs": tops,
    }
    return shape, offset


def _text(tokenizer: ModelTokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
