"""The bytes that a Range header asks for (RFC 9110, section 14). Reads nothing."""

import re

from gateway.http.errors import ApiError

_SPEC = re.compile(r"(\d+)-(\d*)|-(\d+)", re.ASCII)
_MAX_DIGITS = 18  # a longer number is beyond the end of every file; Python reads 4,300


class Span:
    """The bytes `start` up to `end` (exclusive) of a file."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @classmethod
    def asked(cls, header: str | None, num_bytes: int) -> "Span | None":
        """Returns the bytes that the header asks for. None stands for all of them: without the
        header, with one that is malformed or of another unit, with ranges that do not touch each
        other, and for an empty file. Raises ApiError (416)."""
        spans = _spans(header or "", num_bytes)
        if not spans or num_bytes == 0:
            return None
        if not any(span.num_bytes > 0 for span in spans):
            headers = {"content-range": f"bytes */{num_bytes}"}
            message = f"the file has {num_bytes} bytes, none of them in this range"
            raise ApiError(416, "range_not_satisfiable", message, headers=headers)
        return _joined([span for span in spans if span.num_bytes > 0])


def _spans(header: str, num_bytes: int) -> list[Span]:
    """The span of each range, within the file; an empty list if the header is to be ignored."""
    unit, _, ranges = header.partition("=")
    spans = []
    for text in filter(None, (part.strip(" \t") for part in ranges.split(","))):
        match = _SPEC.fullmatch(text)
        if match is None or unit.lower() != "bytes":
            return []
        first, last, suffix = (_number(digits) for digits in match.groups())
        if suffix is not None:
            spans.append(Span(max(num_bytes - suffix, 0), num_bytes))
        elif first is not None and last is not None and last < first:
            return []
        else:
            end = num_bytes if last is None else min(last + 1, num_bytes)
            spans.append(Span(first or 0, end))
    return spans


def _number(digits: str | None) -> int | None:
    """The number that the digits spell; None if there are no digits."""
    if not digits:
        return None
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= _MAX_DIGITS else 10 ** len(digits)


def _joined(spans: list[Span]) -> Span | None:
    """Returns one span for all of them; None if there is a gap."""
    spans.sort(key=lambda span: span.start)
    whole = spans[0]
    for span in spans[1:]:
        if span.start > whole.end:
            return None
        whole = Span(whole.start, max(whole.end, span.end))
    return whole
