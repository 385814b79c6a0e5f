"""Range headers: the bytes that RFC 9110 names, for every short header."""

import itertools

import pytest

from gateway.files import Span
from gateway.http.errors import ApiError

NUMBERS = ["", "0", "1", "2", "3", "4", "5", "007", "9" * 20, "9" * 5000]


def wanted(first: str, last: str, num_bytes: int) -> range | None:
    """The positions that one range names; None if it is malformed."""
    if not first and not last:
        return None
    if not first:
        return range(max(0, num_bytes - int(last[:99])), num_bytes)
    if last and int(last[:99]) < int(first[:99]):
        return None
    end = int(last[:99]) + 1 if last else num_bytes
    return range(int(first[:99]), min(end, num_bytes))


def asked(header: str, num_bytes: int) -> range | None:
    """The positions of the answer; None for the whole file."""
    span = Span.asked(header, num_bytes)
    return None if span is None else range(span.start, span.end)


@pytest.mark.parametrize("num_bytes", range(1, 7))
def test_one_range_gets_its_bytes(num_bytes: int) -> None:
    """Clamped to the file, 416 if it has none of them, the whole file only if it is malformed."""
    for first, last in itertools.product(NUMBERS, NUMBERS):
        header, expected = f"bytes={first}-{last}", wanted(first, last, num_bytes)
        if expected is not None and len(expected) == 0:
            with pytest.raises(ApiError) as refused:
                Span.asked(header, num_bytes)
            assert refused.value.status == 416
        else:
            assert asked(header, num_bytes) == expected, header


def test_several_ranges_get_their_bytes_if_they_touch() -> None:
    """In any order, also where they overlap or are partly beyond the end; otherwise all is sent."""
    specs = [(a, b) for a in "01247" for b in ("", *"13479") if not b or a <= b]
    for pair in itertools.product(specs, specs):
        named = [set(wanted(*spec, 6) or ()) for spec in pair]
        both = sorted(named[0] | named[1])
        header = "bytes=" + " ,\t".join(f"{a}-{b}" for a, b in pair)
        if not both:
            with pytest.raises(ApiError):
                Span.asked(header, 6)
            continue
        is_gapless = both == list(range(both[0], both[-1] + 1))
        expected = range(both[0], both[-1] + 1) if is_gapless else None
        assert asked(header, 6) == expected, header


@pytest.mark.parametrize(
    "header",
    [
        *("", "bytes", "bytes=", "bytes=,", "bytes=-", "bytes=a-b", "bytes=1", "bytes=1-2-3"),
        *("bytes=+1-2", "bytes=1_0-", "bytes=١-", "bytes 0-1", "lines=0-1", "bytes=0-1;2-3"),
        *("bytes=0-1,x", "bytes=0-1,bytes=2-3", "0-1", "bytes=0x1-2", "bytes=1 -2"),
    ],
)
def test_what_is_no_range_of_bytes_is_ignored(header: str) -> None:
    assert Span.asked(header, 6) is None


def test_of_an_empty_file_every_range_is_all_of_it() -> None:
    """An answer with a part of nothing could not say which."""
    for header in ("bytes=0-", "bytes=0-5", "bytes=-1"):
        assert Span.asked(header, 0) is None
