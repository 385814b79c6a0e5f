"""A function library whose clock tests set; in production it asks Redis for the TIME."""

from contract.library import library_source

# Milliseconds that the functions add to the TIME, or `=` and the time itself.
# In a cluster only the functions of the namespace `test` see it.
TEST_CLOCK = "{bw:test:0}test_clock"

_CLOCK = """
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""
# pcall: a node of a cluster may not hold the key.
_TEST_CLOCK = f"""
  local time = redis.call('TIME')
  local set = server().pcall('GET', '{TEST_CLOCK}')
  set = type(set) == 'string' and set or '0'
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
