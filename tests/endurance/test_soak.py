"""Nothing leaks under a mixed load; `scripts/soak --minutes 10` is the long run."""

import dataclasses
import sys
from typing import Any

import pytest

from tests.endurance.footprint import Footprint, Process, Tolerance, compare
from tests.endurance.load import CALLS
from tests.endurance.soak import run_soak

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.campaign,
]

REDIS = Process("redis", 9, rss_bytes=10 * 2**20, num_fds=25, num_threads=5)
GATEWAY = Process("gateway", 7, rss_bytes=80 * 2**20, num_fds=30, num_threads=2)
BEFORE = Footprint((GATEWAY, REDIS), redis_bytes=2 * 2**20, keys=frozenset("abc"))


def changed(**fields: Any) -> Footprint:
    return dataclasses.replace(BEFORE, processes=(dataclasses.replace(GATEWAY, **fields), REDIS))


def with_templates(*pids: int) -> Footprint:
    kind = "gateway.models.chat_template"
    added = (dataclasses.replace(GATEWAY, kind=kind, pid=pid) for pid in pids)
    return dataclasses.replace(BEFORE, processes=(GATEWAY, REDIS, *added))


async def test_a_mixed_load_leaves_nothing_behind() -> None:
    """Memory, descriptors, threads and keys are back at their values, and no caller got an
    unexpected response."""
    report = await run_soak(load_s=6.0, seed=1)

    assert report.violations == []
    assert report.calls.keys() == CALLS.keys()
    kinds = [one.kind for one in report.after.processes]
    assert (kinds.count("gateway"), kinds.count("supervisor"), kinds.count("engine")) == (1, 2, 2)
    assert "redis" in kinds


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (changed(num_fds=60), "file descriptors"),
        (changed(rss_bytes=120 * 2**20), "memory"),
        (changed(num_threads=20), "threads"),
        (changed(pid=8), "has ended"),
        (with_templates(1, 2, 3, 4), "4 processes gateway.models.chat_template wait"),
        (dataclasses.replace(BEFORE, keys=frozenset("abcd")), "key, d"),
        (dataclasses.replace(BEFORE, redis_bytes=4 * 2**20), "bytes"),
    ],
)
def test_leaks_are_reported_by_name(after: Footprint, word: str) -> None:
    """The comparison can fail: it reports each kind of leak."""
    assert compare(BEFORE, BEFORE, Tolerance()) == []
    assert any(word in sentence for sentence in compare(BEFORE, after, Tolerance()))


def test_a_gateway_may_replace_its_processes_for_untrusted_input() -> None:
    """On a busy machine any request may take long."""
    assert compare(with_templates(1, 2), with_templates(2, 3, 4), Tolerance()) == []


def test_redis_has_no_more_connections_than_its_clients() -> None:
    """Each part keeps a few connections that the load opened; a connection without a client is a
    leak."""

    def after(gateway_fds: int, redis_fds: int) -> Footprint:
        gateway = dataclasses.replace(GATEWAY, num_fds=gateway_fds)
        return dataclasses.replace(
            BEFORE, processes=(gateway, dataclasses.replace(REDIS, num_fds=redis_fds))
        )

    assert compare(BEFORE, after(36, 25 + 6 + 8), Tolerance()) == []
    [sentence] = compare(BEFORE, after(36, 25 + 6 + 9), Tolerance())
    assert sentence == "redis 9 has 40 file descriptors, before 25"
