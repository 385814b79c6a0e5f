"""Nothing leaks under a mixed load; `scripts/soak --minutes 10` is the long run."""

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.endurance.calls import CALLS
from tests.endurance.footprint import Footprint, Process, Tolerance, compare
from tests.endurance.series import Sample, draw, sample_of, trends
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
    unexpected response, of all kinds of calls."""
    report = await run_soak(load_s=6.0, seed=1)

    assert report.violations == []
    assert report.calls.keys() == CALLS.keys()
    kinds = Counter(one.kind for one in report.after.processes)
    assert kinds["gateway"] == kinds["callbacks"] == kinds["redis"] == 1
    assert (kinds["supervisor"], kinds["engine"], kinds["encoder's engine"]) == (5, 2, 3)


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (changed(num_fds=60), "file descriptors"),
        (changed(rss_bytes=120 * 2**20), "memory"),
        (changed(num_threads=60), "threads"),
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


def test_keys_that_come_and_go_are_no_leak() -> None:
    coming = {"{bw:soak:0}:idle:m", "{rq}:clean_groups"}
    after = dataclasses.replace(BEFORE, keys=BEFORE.keys | coming)
    assert compare(BEFORE, after, Tolerance()) == []


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


def samples(more_bytes: int, more_fds: int) -> list[Sample]:
    """A minute, in which a gateway grows at every sample."""
    found = []
    for number in range(12):
        grown = changed(rss_bytes=80 * 2**20 + number * more_bytes, num_fds=30 + number * more_fds)
        found.append(sample_of(5.0 * number, grown))
    return found


@pytest.mark.parametrize(
    ("growth", "word"), [((2 * 2**20, 0), "resident MiB of gateway"), ((0, 2), "descriptors")]
)
def test_growth_under_a_steady_load_is_reported(growth: tuple[int, int], word: str) -> None:
    """Of each quantity by itself, also where all is given back at the end."""
    assert trends(samples(0, 0)) == []
    [sentence] = trends(samples(*growth))
    assert word in sentence


def test_a_run_is_drawn(tmp_path: Path) -> None:
    """All quantities over time, in one picture."""
    draw(samples(2**20, 1), 50.0, tmp_path / "soak.svg")
    assert (tmp_path / "soak.svg").read_text().count("<svg") == 1
