"""Attacks on a gateway: what they send, and the judgement of a turn beside one."""

import gzip
import json

import pytest

from bench.hostile_calls import ATTACKS
from bench.neighbours import Memory, Turn
from gateway.settings import GatewaySettings

ALONE = Turn("", plain_s=[0.010] * 100, structured_s=[0.012] * 100)
FIRST_BYTES = 90 * 10**6
MB = 10**6


def beside(**changes: object) -> Turn:
    fields = {"plain_s": [0.015] * 100, "structured_s": [0.015] * 100, **changes}
    return Turn("an attack", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"plain_s": [0.021] * 100}, "plain p50 2.1 times"),
        ({"structured_s": [0.015] * 90 + [0.040] * 10}, "structured p99 3.3 times"),
        ({"plain_s": []}, "plain: no call"),
        ({"num_failed": 1}, "1 failures"),
        ({"memory": Memory(peak=351 * MB)}, "gateway 351 MB"),
        ({"memory": Memory(after=141 * MB)}, "still 141 MB"),
        ({"memory": Memory(child=300 * MB)}, "child 300 MB"),
    ],
)
def test_a_broken_bound_is_named(changes: dict[str, object], word: str) -> None:
    """Each by itself; a turn within all bounds has none."""
    assert beside().exceeded(ALONE, FIRST_BYTES) == []
    assert word in beside(**changes).exceeded(ALONE, FIRST_BYTES)


@pytest.mark.parametrize("name", [name for name in ATTACKS if "gzip" not in name])
def test_an_attack_fits_a_body(name: str) -> None:
    """So it is refused for what it contains, not for its length."""
    limit = GatewaySettings(redis_url="redis://unused").max_body_bytes
    for call in ATTACKS[name].calls(1)[:2]:
        is_packed = call.headers.get("content-encoding") == "gzip"
        body = gzip.decompress(call.body) if is_packed else call.body
        assert len(body) <= limit
        if body:
            json.loads(body)
