"""The tests of the contract on one partition or on one of several."""

import pytest

from contract.keys import Keys
from tests.cluster import partition_of_test


@pytest.fixture
def keys() -> Keys:
    """With BATCHWAY_TEST_PARTITIONS, tests have theirs in different partitions."""
    return Keys("test", partition_of_test())
