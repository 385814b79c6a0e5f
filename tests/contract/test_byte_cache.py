"""A cache that is bounded in bytes, and in what one owner may take of them."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.byte_cache import ByteCache

MAX_BYTES = 100_000
_ENTRIES = st.tuples(
    st.text(max_size=3), st.integers(0, 2 * MAX_BYTES), st.sampled_from(["a", "b", "c", ""])
)


@given(st.lists(_ENTRIES, max_size=60))
def test_no_owner_takes_more_than_half_and_all_no_more_than_the_bound(
    entries: list[tuple[str, int, str]],
) -> None:
    """Whatever is kept in whichever order; the newest value of a key is the one that is found."""
    cache: ByteCache[tuple[int, int]] = ByteCache(MAX_BYTES)
    newest: dict[str, tuple[int, int]] = {}
    owners: dict[str, str] = {}
    for number, (key, num_bytes, owner) in enumerate(entries):
        cache.keep(key, (number, num_bytes), num_bytes, owner)
        newest[key], owners[key] = (number, num_bytes), owner
        found = {each: cache.get(each) for each in newest}
        kept = {each: value for each, value in found.items() if value is not None}
        assert all(value == newest[each] for each, value in kept.items())
        assert sum(size for _, size in kept.values()) <= cache.num_bytes <= MAX_BYTES
        for each in set(owners.values()):
            own = sum(size for key, (_, size) in kept.items() if owners[key] == each)
            assert own <= MAX_BYTES // 2
        assert (key in kept) == (num_bytes + 1024 <= MAX_BYTES // 2)


def test_a_flood_of_one_owner_leaves_the_entries_of_others() -> None:
    cache: ByteCache[int] = ByteCache(MAX_BYTES)
    for number in range(10):
        cache.keep(f"quiet {number}", number, 1_000, "quiet")
    for number in range(1_000):
        cache.keep(f"loud {number}", number, 3_000, "loud")
    assert [cache.get(f"quiet {number}") for number in range(10)] == list(range(10))


@pytest.mark.parametrize("num_bytes", [0, 1, 1_000])
def test_small_entries_count_too(num_bytes: int) -> None:
    """Keys and places take memory, even if the values take none."""
    cache: ByteCache[int] = ByteCache(MAX_BYTES)
    for number in range(10_000):
        cache.keep("x" * 5_000 + str(number), number, num_bytes, str(number))
    kept = sum(cache.get("x" * 5_000 + str(number)) is not None for number in range(10_000))
    assert 0 < kept <= MAX_BYTES // 1024


def test_a_key_that_is_no_text_is_a_key() -> None:
    """JSON may hold half of a surrogate pair."""
    cache: ByteCache[int] = ByteCache(MAX_BYTES)
    cache.keep("\ud800", 1, 1)
    assert (cache.get("\ud800"), cache.get("\ud801")) == (1, None)
    cache.drop("\ud800")
    cache.drop("\ud801")
    assert (cache.get("\ud800"), cache.num_bytes) == (None, 0)


def test_keeping_takes_no_longer_among_many_entries() -> None:
    """As many lines of code run."""

    def num_lines(num_entries: int) -> int:
        cache: ByteCache[int] = ByteCache(num_entries * 1024)
        for number in range(num_entries):
            cache.keep(str(number), number, 0, str(number % 2))
        lines = 0

        def count(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        cache.keep("x", 1, 0, "0")
        sys.settrace(before)
        return lines

    assert num_lines(10) == num_lines(5_000) > 10
