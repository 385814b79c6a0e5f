"""Decodes a request's body by its Content-Encoding, as it comes and within a bound."""

import zlib

from gateway.http.errors import ApiError, bad_request

_ACCEPTED = ("gzip", "deflate")
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 31, 15, -15  # zlib's names of its formats
_ZLIB_METHOD = 8  # in the low four bits of its first byte; deflate without zlib cannot begin so


class TooMuch(Exception):
    """The body would have more bytes than are allowed."""


class Decoder:
    """Decodes one body. `encoding`: the header's value; `max_bytes`: of the decoded body.

    It stops decoding at the limit, because a few bytes may stand for gigabytes. Raises ApiError
    (415) for other encodings.
    """

    def __init__(self, encoding: str, max_bytes: int) -> None:
        self._encoding = encoding.strip().lower().removeprefix("x-")
        self._left = max_bytes
        if self._encoding not in ("", "identity", *_ACCEPTED):
            message = f"the content-encoding must be {' or '.join(_ACCEPTED)}, or absent"
            headers = {"accept-encoding": ", ".join(_ACCEPTED)}
            raise ApiError(415, "unsupported_media_type", message, headers=headers)
        self._open = zlib.decompressobj()  # replaced at the first byte
        self._has_begun = False

    def decode(self, data: bytes, *, is_last: bool) -> bytes:
        """The next bytes of the body. Raises TooMuch, and ApiError if it is not so encoded."""
        found = data if self._encoding not in _ACCEPTED else self._decompressed(data, is_last)
        self._left -= len(found)
        if self._left < 0:
            raise TooMuch
        return found

    def _decompressed(self, data: bytes, is_last: bool) -> bytes:
        parts, room = list[bytes](), self._left
        try:
            while data and room >= 0:
                if not self._has_begun or (self._open.eof and self._encoding == "gzip"):
                    self._begin(data[0])  # a gzip file may have several members
                parts.append(self._open.decompress(data, room + 1))
                room -= len(parts[-1])
                if self._open.eof and not self._open.unused_data:
                    break
                if self._encoding == "deflate" and self._open.eof:
                    raise self._malformed()
                data = self._open.unused_data
        except zlib.error:
            raise self._malformed() from None
        if is_last and room >= 0 and not self._open.eof:
            raise self._malformed()
        return b"".join(parts)

    def _begin(self, first: int) -> None:
        bits = _GZIP_BITS
        if self._encoding == "deflate":  # zlib's, by the standard; some clients leave its head out
            bits = _ZLIB_BITS if first & 0x0F == _ZLIB_METHOD else _RAW_BITS
        self._open, self._has_begun = zlib.decompressobj(bits), True

    def _malformed(self) -> ApiError:
        return bad_request("bad_request", f"the body is no whole {self._encoding} data")
