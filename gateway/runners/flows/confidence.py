"""How sure a cascade's member is of its answer. Knows no jobs and asks no scorer models."""

import math
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from contract.flows import Confidence


def confidence(kind: Confidence, logprobs: Sequence[float], text: str) -> float:
    """Returns how sure the member is, from 0 to 1. `logprobs` (nats): of the answer's tokens;
    `text`: the answer. An answer without tokens, or without the field as a number from 0 to 1,
    gives 0. Not for kind `scorer`."""
    assert kind.by != "scorer"
    if kind.by == "field":
        return _field(kind.field, text)
    if not logprobs:
        return 0.0
    if kind.by == "mean_logprob":
        value = sum(logprobs) / len(logprobs)  # not fsum: it raises where a sum overflows
    else:  # the lower of the two neighbours, so that a single bad token counts
        value = sorted(logprobs)[math.floor(kind.quantile * (len(logprobs) - 1))]
    return 0.0 if math.isnan(value) else math.exp(min(value, 0.0))


def _field(name: str, text: str) -> float:
    value: object = None
    with suppress(msgspec.DecodeError, RecursionError):
        answer = msgspec.json.decode(text)
        value = answer.get(name) if isinstance(answer, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return 0.0
    return float(value)
