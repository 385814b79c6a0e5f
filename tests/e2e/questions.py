"""Questions for the demo model, and the Redis keys of its jobs: those of the partition in
which callers without a key live."""

from typing import Any

from contract.keys import Keys
from contract.partitions import Entry, PartitionMap
from gateway.redis.key_ring import DEFAULT_TENANT
from tests.cluster import num_test_partitions

MODEL = "demo"
_PARTITIONS = PartitionMap(1, {number: Entry() for number in range(num_test_partitions())})
KEYS = Keys("e2e", _PARTITIONS.choose(DEFAULT_TENANT))
LONG_COUNT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from 1 to 200."}],
    "temperature": 0,
}


def count(first: int, last: int) -> str:
    """The right answer to `Count from first to last.`"""
    return ", ".join(map(str, range(first, last + 1)))
