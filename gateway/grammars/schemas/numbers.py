"""Bounds, steps and constants of numbers, in a form that llguidance enforces.

It reads numbers as doubles, which are inexact beyond some 15 digits. Its regular expressions are
for numbers below 10^18 with at most 18 decimals. They allow an excluded bound if the other bound is
within the same integer: {"exclusiveMinimum": 0, "maximum": 0.5} allows 0. So every bound becomes an
included one, rounded inwards to a number that it reads exactly. No output violates the given bound;
what is lost is the last part in 10^15, or what is within 10^-18 of 0.
"""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from gateway.grammars.schemas.refusals import Unenforceable

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
MAX_STEP = 10_000  # multipleOf without its decimal point; a lexer needs so many states

_NUM_DIGITS, _NUM_DECIMALS = 15, 18
_LARGEST = Decimal(10**18)
# The bounds of integers that llguidance takes. It reads the last as 2^63, and writes it well.
_FIRST_INT, _LAST_INT = Decimal(-(2**63) + 1024), Decimal(2**63 - 1)

_Bound = tuple[Decimal, bool]  # whether it is excluded


def is_exact(number: int | float) -> bool:
    """Whether llguidance writes this constant unchanged."""
    if isinstance(number, int):
        return -(2**63) < number < 2**64 and int(float(number)) == number
    if not math.isfinite(number):
        return False
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    significand = int("".join(map(str, digits)))
    return isinstance(exponent, int) and abs(exponent) <= 22 and significand <= 2**53


def bounds(schema: Mapping[str, Any], is_integer: bool) -> dict[str, int | float]:
    """Returns `minimum` and `maximum` for all bounds of a schema. They contradict each other if
    nothing is between the given ones. Raises Unenforceable."""
    low = _tighter(schema, "minimum", "exclusiveMinimum", 1)
    high = _tighter(schema, "maximum", "exclusiveMaximum", -1)
    if is_integer:
        low, high = _whole(low, 1), _whole(high, -1)
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return {"minimum": 1, "maximum": 0}
    least, most = _integers(low, high) if is_integer else _decimals(low, high)
    if least is not None and most is not None and least > most:
        raise Unenforceable("minimum", "what lies between it and maximum has too many digits")
    found = {"minimum": least, "maximum": most}
    return {name: _plain(bound) for name, bound in found.items() if bound is not None}


def step(multiple_of: int | float) -> int | float:
    """Returns `multipleOf` if it can be enforced. Raises Unenforceable."""
    _, digits, exponent = _decimal(multiple_of).normalize().as_tuple()
    assert isinstance(exponent, int), "it is finite"
    without_point = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    # as llguidance moves the point
    found, num_decimals = float(multiple_of), 0
    while found != int(found) and num_decimals < _NUM_DECIMALS:
        found, num_decimals = found * 10, num_decimals + 1
    if without_point > MAX_STEP or (found, num_decimals) != (without_point, max(-exponent, 0)):
        raise Unenforceable("multipleOf", f"it has too many digits, or is over {MAX_STEP:,}")
    return multiple_of


def _tighter(schema: Mapping[str, Any], including: str, excluding: str, sign: int) -> _Bound | None:
    """Returns the stricter of an included and an excluded bound. `sign`: 1 for lower bounds."""
    given, excluded = schema.get(including), schema.get(excluding)
    if isinstance(excluded, bool):  # as in draft 4
        return None if given is None else (_decimal(given), excluded)
    found = [] if given is None else [(_decimal(given), False)]
    found += [] if excluded is None else [(_decimal(excluded), True)]
    return max(found, key=lambda bound: (sign * bound[0], bound[1]), default=None)


def _decimal(number: int | float) -> Decimal:
    return Decimal(number if isinstance(number, int) else repr(number))


def _whole(bound: _Bound | None, sign: int) -> _Bound | None:
    """The first integer within a bound."""
    if bound is None:
        return None
    whole = bound[0].to_integral_value(ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    return (whole + sign if bound[1] and whole == bound[0] else whole), False


def _integers(low: _Bound | None, high: _Bound | None) -> tuple[Decimal | None, Decimal | None]:
    least, most = low and low[0], high and high[0]
    if least is not None:
        is_wide = most is None and least > 0
        if not -(2**63) <= least <= (_LARGEST - 64 if is_wide else _LAST_INT):
            raise Unenforceable("minimum", "it has too many digits")
        least = max(_double(least, 1), _FIRST_INT)
    if most is not None:
        is_wide = least is None and most < 0
        if not (64 - _LARGEST if is_wide else -(2**63)) <= most <= _LAST_INT:
            raise Unenforceable("maximum", "it has too many digits")
        most = most if most == _LAST_INT else _double(most, -1)
    return least, most


def _double(whole: Decimal, sign: int) -> Decimal:
    """The first integer within a bound that is a double."""
    nearest = float(whole)
    if sign * (int(nearest) - int(whole)) < 0:
        nearest = math.nextafter(nearest, sign * math.inf)
    return Decimal(int(nearest))


def _decimals(low: _Bound | None, high: _Bound | None) -> tuple[Decimal | None, Decimal | None]:
    for name, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and abs(bound[0]) >= _LARGEST:
            raise Unenforceable(name, "it has over 18 digits before the point")
    return low and _rounded(*low, ROUND_CEILING, 1), high and _rounded(*high, ROUND_FLOOR, -1)


def _rounded(bound: Decimal, is_excluded: bool, rounding: str, sign: int) -> Decimal:
    """The first number within a bound that llguidance reads exactly."""
    exponent = bound.adjusted() - _NUM_DIGITS + 1 if bound else -_NUM_DECIMALS
    unit = Decimal(1).scaleb(max(exponent, -_NUM_DECIMALS))
    within = (bound / unit).to_integral_value(rounding) * unit
    return within + sign * unit if is_excluded and within == bound else within


def _plain(bound: Decimal) -> int | float:
    return int(bound) if bound == bound.to_integral_value() else float(bound)
