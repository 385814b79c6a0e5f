"""Every log line names the version of the configuration."""

import io
import logging
from collections.abc import Iterator

import pytest

from workers import logs


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """The log of the process, through a handler of its own."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    yield stream
    logs.stamp("")
    logging.getLogger().removeHandler(handler)


def test_lines_carry_the_version_that_is_in_force(output: io.StringIO) -> None:
    """One version per line; none without a configuration."""
    log = logging.getLogger("batchway.test")
    for version in ("abc", "def", ""):
        logs.stamp(version)
        log.warning("jobs=%d", 3)
    assert output.getvalue().splitlines() == [
        "jobs=3 batching=abc",
        "jobs=3 batching=def",
        "jobs=3",
    ]
