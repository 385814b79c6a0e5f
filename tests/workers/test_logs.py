"""Every log line says under which configuration it was written."""

import io
import logging
from collections.abc import Iterator

import pytest

from workers import logs


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """What the process logs, through a handler of its own."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    yield stream
    logs.stamp("")
    logging.getLogger().removeHandler(handler)


def test_lines_carry_the_version_that_is_in_force(output: io.StringIO) -> None:
    """One version at a time, once a line; nothing where there is no configuration."""
    log = logging.getLogger("batchway.test")
    for version in ("abc", "def", ""):
        logs.stamp(version)
        log.warning("jobs=%d", 3)
    assert output.getvalue().splitlines() == [
        "jobs=3 batching=abc",
        "jobs=3 batching=def",
        "jobs=3",
    ]
