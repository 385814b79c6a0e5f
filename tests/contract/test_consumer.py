"""How leases are renewed: what ends the renewals, and what does not."""

import asyncio

import pytest

from contract.batches import LeaseLost
from contract.consumer import keep_leases
from contract.errors import BrokerUnavailable, BrokerUnfit, CommandDenied

pytestmark = pytest.mark.anyio


async def kept(*outcomes: Exception | None) -> int:
    """Renews until an outcome ends it; returns how often."""
    left = list(outcomes)

    async def renew() -> None:
        if (outcome := left.pop(0)) is not None:
            raise outcome

    async with asyncio.timeout(10):
        await keep_leases(renew, every_s=0.0)
    return len(outcomes) - len(left)


async def test_an_outage_is_outlived_and_a_lost_lease_is_the_end() -> None:
    assert await kept(None, BrokerUnavailable("down"), None, LeaseLost("b"), None) == 4


@pytest.mark.parametrize("error", [BrokerUnfit("x"), CommandDenied("x"), ValueError("x")])
async def test_other_errors_are_raised(error: Exception) -> None:
    """An operator must mend them, so that whoever holds the leases ends and says so."""
    with pytest.raises(type(error)):
        await kept(None, error)


async def test_a_renewal_may_be_hurried() -> None:
    hurry, renewed = asyncio.Event(), asyncio.Event()

    async def renew() -> None:
        hurry.clear()
        renewed.set()
        raise LeaseLost("b")

    keeping = asyncio.create_task(keep_leases(renew, every_s=3_600.0, hurry=hurry))
    await asyncio.sleep(0)
    assert not renewed.is_set()
    hurry.set()
    async with asyncio.timeout(10):
        await keeping
    assert renewed.is_set()
