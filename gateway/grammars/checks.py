"""Finds faults in a grammar: llguidance does not compile it, or its outputs reach a dead end.

llguidance compiles grammars in which nothing may follow: a rule that consists of itself, a pattern
of names that are all taken, more alternatives at one place than it considers. A worker would find
out in the middle of an answer. So two outputs are written here, byte by byte. They prove nothing,
but ordinary outputs have the same faults.
"""

import random
import re
from collections import Counter
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from contract.jobs import GRAMMAR_LIMITS

_BYTES = LLTokenizer("byte")  # a token for each byte
_END: int = _BYTES.eos_token
_MAX_MESSAGE_CHARS = 300
_PLACE = re.compile(r"^at \d+\(\d+\): ")
# A worker's tokens have many bytes, so a step needs, and has, a higher limit.
LIMITS = LLParserLimits(
    **GRAMMAR_LIMITS | {"step_lexer_fuel": 200_000, "step_max_items": 30_000},
)
_NUM_STEPS = 150  # of a walk, apart from forced text
_TEXT = 64  # only within free text may more bytes than this follow
_QUOTE = ord('"')
_CLOSING, _OPENING = tuple(b'"}]'), tuple(b"{[")
# Texts of the library's errors, and their meanings.
_REASONS = {
    "row has": "too many alternatives at one place, as of optional properties or anyOf",
    "Too many items": "too much text is forced at once, or it is too ambiguous",
    "lexer": "a pattern, a length or a number is too complex",
    "fuel": "a pattern, a length or a number is too complex",
}
_NO_WAY = "an output can come to a place where nothing may follow"

Choose = Callable[[int], int]  # chooses one of the tokens that may follow, given as bits


def fault_of(grammar: str) -> str:
    """Why outputs of the grammar cannot be forced, in a sentence; "" if no fault is found."""
    matcher = _matcher(grammar)
    return sentence(matcher.get_error()) if matcher.is_error() else _dead_end(matcher)


def dead_end(grammar: str) -> str:
    """Returns why an output of a valid grammar cannot go on. Ignores grammars with tokens."""
    matcher = _matcher(grammar)
    return "" if matcher.is_error() else _dead_end(matcher)


def sentence(message: str) -> str:
    """An error message of the library, without the source that it quotes."""
    first, *others = message.splitlines()
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    text = _PLACE.sub("", " ".join([first, *reasons]))
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]


def _matcher(grammar: str) -> LLMatcher:
    return LLMatcher(_BYTES, grammar, log_level=0, limits=LIMITS)


def _dead_end(matcher: LLMatcher) -> str:
    """Returns the first fault that a walk finds."""
    walks: list[Choose] = [_Closing(), _Varied()]
    return next(filter(None, (_fault(matcher.deep_copy(), choose) for choose in walks)), "")


def _fault(matcher: LLMatcher, choose: Choose) -> str:
    for _ in range(_NUM_STEPS):
        if forced := matcher.compute_ff_bytes():
            matcher.consume_tokens(list(forced))
        mask = 0 if matcher.is_stopped() else int.from_bytes(matcher.compute_bitmask(), "little")
        token = choose(mask) if mask else _END
        if token == _END or not matcher.consume_token(token):
            break
    if not matcher.is_error():
        return ""
    error = matcher.get_error()
    return next((reason for part, reason in _REASONS.items() if part in error), _NO_WAY)


def _tokens(mask: int) -> list[int]:
    return [token for token in (*range(256), _END) if mask >> token & 1]


class _Closing:
    """Chooses what ends strings, lists, objects and the output as soon as possible."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def __call__(self, mask: int) -> int:
        for token in (_END, *_CLOSING):
            if mask >> token & 1:
                return token
        allowed = _tokens(mask)
        plain = [token for token in allowed if token not in _OPENING]
        return self._draw.choice(plain or allowed)


class _Varied:
    """Chooses what it has chosen least often, and writes no long texts."""

    def __init__(self) -> None:
        self._num_taken: Counter[int] = Counter()

    def __call__(self, mask: int) -> int:
        if mask >> _QUOTE & 1 and mask.bit_count() > _TEXT:
            return _QUOTE
        token = min(_tokens(mask), key=self._num_taken.__getitem__)
        self._num_taken[token] += 1
        return token
