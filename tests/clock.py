"""A function library whose clock tests set; in production it asks Redis for the TIME."""

from contract.keys import Keys
from contract.library import library_source
from tests.cluster import partition_of_test

_NUM_CLOCKS = 8  # partitions that may have one


def clock_of(partition: int) -> str:
    return f"{Keys('test', partition).tag}test_clock"


# Milliseconds that the functions add to the TIME, or `=` and the time itself.
# In a cluster only the functions of the namespace `test` see it.
TEST_CLOCK = clock_of(0)


def clock_key() -> str:
    """The clock of the partition in which the running test has its keys."""
    return clock_of(partition_of_test())


_CLOCK = """
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""
_CLOCKS = ", ".join(f"'{clock_of(partition)}'" for partition in range(_NUM_CLOCKS))
# pcall: in a cluster a function reaches the clock of its own partition only.
_TEST_CLOCK = f"""
  local time, set = redis.call('TIME'), '0'
  for _, key in ipairs({{{_CLOCKS}}}) do
    local found = server().pcall('GET', key)
    if type(found) == 'string' then set = found end
  end
  if string.sub(set, 1, 1) == '=' then return tonumber(string.sub(set, 2)) end
  return time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(set)
end
"""


def with_test_clock(source: str) -> str:
    """The library's text with a clock that tests set."""
    assert source.count(_CLOCK) == 1
    return source.replace(_CLOCK, _TEST_CLOCK)


def library_with_test_clock() -> str:
    """The library that tests load instead of `library_source`."""
    return with_test_clock(library_source())
