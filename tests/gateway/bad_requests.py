"""Malformed request bodies, each named by its fault. The gateway answers each with a 4xx in its own
format."""

import json
import random
from collections.abc import Iterator

from tests.gateway.fake_worker import MODEL

_GOOD = {"model": MODEL, "prompt": "ab", "max_tokens": 2}
_TEXT = json.dumps(_GOOD)

BODIES: dict[str, bytes] = {
    "nothing": b"",
    "spaces": b" \n\t ",
    "half an object": _TEXT[:-9].encode(),
    "two objects": (_TEXT + _TEXT).encode(),
    "a tail": (_TEXT + "x").encode(),
    "an array": b"[" + _TEXT.encode() + b"]",
    "a string": b'"model"',
    "a number": b"1",
    "null": b"null",
    "single quotes": _TEXT.replace('"', "'").encode(),
    "a comma too many": (_TEXT[:-1] + ",}").encode(),
    "a comment": ("/* x */" + _TEXT).encode(),
    "a byte order mark": b"\xef\xbb\xbf" + _TEXT.encode(),
    "UTF-16": _TEXT.encode("utf-16"),
    "UTF-32": _TEXT.encode("utf-32"),
    "Latin-1": b'{"model": "h\xe4sh", "prompt": "ab"}',
    "an overlong slash": b'{"model": "\xc0\xaf", "prompt": "ab"}',
    "a surrogate in UTF-8": b'{"model": "hash", "prompt": "\xed\xa0\x80"}',
    "a lone high surrogate": b'{"model": "hash", "prompt": "\\ud800"}',
    "a lone low surrogate": b'{"model": "hash", "prompt": "\\udfff x"}',
    "surrogates the wrong way round": b'{"model": "hash", "prompt": "\\udc00\\ud800"}',
    "a surrogate as a name": b'{"model": "hash", "prompt": "ab", "\\ud800": 1}',
    "a raw zero byte": b'{"model": "hash", "prompt": "a\x00b"}',
    "a raw line end": b'{"model": "hash", "prompt": "a\nb"}',
    "an unknown escape": b'{"model": "hash", "prompt": "\\x41"}',
    "half an escape": b'{"model": "hash", "prompt": "\\u00"}',
    "NaN": b'{"model": "hash", "prompt": "ab", "temperature": NaN}',
    "Infinity": b'{"model": "hash", "prompt": "ab", "temperature": Infinity}',
    "minus Infinity": b'{"model": "hash", "prompt": "ab", "top_p": -Infinity}',
    "a number beyond doubles": b'{"model": "hash", "prompt": "ab", "temperature": 1e999}',
    "a large seed": b'{"model": "hash", "prompt": "ab", "seed": 18446744073709551616}',
    "ten thousand digits": b'{"model": "hash", "prompt": "ab", "seed": ' + b"9" * 10_000 + b"}",
    "a negative count": b'{"model": "hash", "prompt": "ab", "max_tokens": -2}',
    "a fraction of a count": b'{"model": "hash", "prompt": "ab", "n": 1.5}',
    "a count as text": b'{"model": "hash", "prompt": "ab", "n": "1"}',
    "a truth as a count": b'{"model": "hash", "prompt": "ab", "n": true}',
    "octal": b'{"model": "hash", "prompt": "ab", "n": 01}',
    "hexadecimal": b'{"model": "hash", "prompt": "ab", "n": 0x1}',
    "a name twice": b'{"model": "hash", "prompt": "ab", "prompt": "cd"}',
    "a name twice, once escaped": b'{"model": "hash", "prompt": "ab", "pr\\u006fmpt": "cd"}',
    "a name twice, deep": b'{"model": "hash", "prompt": "ab", "metadata": {"a": "1", "a": "2"}}',
    "an unknown name": b'{"model": "hash", "prompt": "ab", "sudo": true}',
    "a name of Python": b'{"model": "hash", "prompt": "ab", "__class__": "x"}',
    "arrays, deep": b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}",
    "arrays, very deep": b"[" * 100_000,
    "objects, very deep": b'{"a":' * 40_000,
    "closed more than opened": b"}" * 100_000,
    "many names": json.dumps({f"k{i}": 0 for i in range(5_000)}).encode(),
    "a long name": json.dumps({"k" * 100_000: 0}).encode(),
    "many messages of nothing": b'{"model": "hash", "messages": [' + b"{}," * 50_000 + b"{}]}",
    "a role that is a list": b'{"model": "hash", "messages": [{"role": ["user"], "content": "a"}]}',
    "a kind of part that is an object": b'{"model": "hash", "messages": [{"role": "user", '
    b'"content": [{"type": {"a": []}, "text": "a"}]}]}',
    "many stops": json.dumps(_GOOD | {"stop": ["a"] * 10_000}).encode(),
    "many biases": json.dumps(_GOOD | {"logit_bias": {str(i): 1 for i in range(5_000)}}).encode(),
    "a prompt of prompts": json.dumps(_GOOD | {"prompt": [["a"], ["b"]]}).encode(),
    "token ids out of range": json.dumps(_GOOD | {"prompt": [-1, 2**70]}).encode(),
    "a long prompt": json.dumps(_GOOD | {"prompt": "ab" * 50_000}).encode(),
    "quotes without end": b'{"model": "' + b'\\"' * 50_000,
    "a form": b"model=hash&prompt=ab",
}

CONTENT_TYPES = (
    *("", "text/plain", "text/json", "application/xml", "multipart/form-data; boundary=x"),
    *("application/x-www-form-urlencoded", "application/jsonx", "application/json, text/html"),
)

BAD_HOSTS = (
    b"evil.example",
    b"127.0.0.1:80@evil.example",
    b"127.0.0.1:80 evil.example",  # as of a host that folds
    b"localhost/../../v1/models?x=",
)


_PIECES: tuple[bytes, ...] = (
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\x00", b"\xff", b"1e", b"null", b"NaN"),
    *(b" ", b"\n", b"\\u0041", b"\\ud800", b"\xc3\xa9", b"0", b"-", b"[" * 5_000),
)


def spoilt(rng: random.Random, body: bytes) -> bytes:
    """The body with a few bytes removed, repeated, changed or added."""
    raw = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(4):
            case 0:
                del raw[at : at + rng.randint(1, 9)]
            case 1:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                raw[at:at] = raw[at : at + rng.randint(1, 9)]
            case _:
                raw[at:at] = rng.choice(_PIECES)
    return bytes(raw)


def spoilt_bodies(number: int, seed: int) -> Iterator[bytes]:
    """Valid bodies that are spoilt; most are no longer JSON."""
    rng = random.Random(seed)
    for _ in range(number):
        yield spoilt(rng, _TEXT.encode())
