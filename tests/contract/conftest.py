"""The tests of the contract on one partition or on one of several, and tables of decisions, which
need a server that is no cluster."""

import os

import pytest

from contract.keys import Keys
from tests.cluster import partition_of_test
from tests.oracle.conftest import calls, world

__all__ = ["calls", "world"]

on_one_server = pytest.mark.skipif(
    bool(os.environ.get("BATCHWAY_TEST_CLUSTER")), reason="its world is one server"
)


@pytest.fixture
def keys() -> Keys:
    """With BATCHWAY_TEST_PARTITIONS, tests have theirs in different partitions."""
    return Keys("test", partition_of_test())
