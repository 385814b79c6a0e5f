"""A tenant with fewer places than another in its lane takes one from it; equal tenants take
none."""

from collections import Counter

import msgspec
import pytest

from tests.workers.engine.harness import Harness, Sizes, assert_oracle, job
from workers.ipc.messages import Request

_NUM_PLACES = 6


def harness_of(num_blocks: int = 400) -> Harness:
    return Harness(Sizes(num_blocks=num_blocks, max_num_seqs=_NUM_PLACES))


def flood(
    harness: Harness, tenant: str, num_jobs: int, max_tokens: int = 40, weight: float = 1.0
) -> list[Request]:
    requests = [
        msgspec.structs.replace(
            job(
                f"{tenant}-{i}",
                range(i, i + 8),
                tenant=tenant,
                max_tokens=max_tokens,
                ignore_eos=True,
            ),
            weight=weight,
        )
        for i in range(num_jobs)
    ]
    for request in requests:
        harness.add(request)
    return requests


def places(harness: Harness) -> dict[str, int]:
    running = [s.tenant for s in harness.engine.sequences if s.block_ids]
    return {tenant: running.count(tenant) for tenant in sorted(set(running))}


def test_a_tenant_without_a_place_has_a_token_within_two_steps() -> None:
    """Another tenant has all places and the head of the queue; it loses no token."""
    harness = harness_of()
    requests = flood(harness, "heavy", 2 * _NUM_PLACES)
    for _ in range(5):
        harness.step()
    requests += flood(harness, "light", 1, max_tokens=4)

    reports = [harness.step(), harness.step()]
    assert "light-0" in {o.job_id for report in reports for o in report.outputs}
    assert harness.num_preemptions == 1

    harness.run()
    assert_oracle(harness, requests)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((1.0, 1.0, 1.0), {"a": 2, "b": 2, "c": 2}),
        ((1.0, 2.0, 3.0), {"a": 1, "b": 2, "c": 3}),
    ],
)
def test_places_are_shared_by_weight_and_then_nobody_is_displaced(
    weights: tuple[float, ...], shares: dict[str, int]
) -> None:
    """Of three tenants, the first came first. They keep their places while all have work."""
    harness = harness_of()
    requests = flood(harness, "a", 12, weight=weights[0])
    harness.step()
    requests += [*flood(harness, "b", 12, weight=weights[1])]
    requests += [*flood(harness, "c", 12, weight=weights[2])]
    for _ in range(3):
        harness.step()
    for _ in range(21):
        assert (places(harness), harness.num_preemptions) == (shares, _NUM_PLACES - shares["a"])
        harness.step()

    harness.run()
    assert_oracle(harness, requests)


def test_tokens_are_shared_by_weight() -> None:
    """Two tenants with long queues share one place; one has three times the weight of the other."""
    harness = Harness(Sizes(max_num_seqs=1))
    flood(harness, "a", 40, max_tokens=4)
    flood(harness, "b", 40, max_tokens=4, weight=3.0)
    num_tokens: Counter[str] = Counter()
    while num_tokens.total() < 160:
        num_tokens.update(output.job_id[0] for output in harness.step().outputs)
    assert abs(num_tokens["b"] - 3 * num_tokens["a"]) <= 12


def test_blocks_are_shared_where_they_are_short() -> None:
    """Places are free but blocks are not: a tenant with many sequences gives some up."""
    harness = harness_of(num_blocks=24)
    requests = flood(harness, "heavy", 12)
    for _ in range(4):
        harness.step()
    requests += flood(harness, "light", 1, max_tokens=4)
    reports = [harness.step() for _ in range(4)]
    assert "light-0" in {o.job_id for report in reports for o in report.outputs}

    harness.run()
    assert_oracle(harness, requests)


def test_a_tenant_alone_displaces_none_of_its_own() -> None:
    """However many of its jobs wait."""
    harness = harness_of()
    flood(harness, "heavy", 20)
    harness.run()
    assert harness.num_preemptions == 0


def test_a_sequence_is_displaced_a_limited_number_of_times() -> None:
    """So each sequence ends, however often another tenant returns."""
    harness = Harness(Sizes(num_blocks=400, max_num_seqs=_NUM_PLACES, max_preemptions=1))
    requests = flood(harness, "heavy", _NUM_PLACES)
    harness.step()
    most = 0
    for number in range(12):
        harness.add(job(f"light-{number}", range(9), tenant="light", max_tokens=1))
        harness.step()
        most = max(most, *(s.num_preemptions for s in harness.engine.sequences))
    assert (most, harness.num_preemptions) == (1, _NUM_PLACES)
    harness.run()
    assert_oracle(harness, requests)
