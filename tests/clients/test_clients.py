"""Real clients against the server, where `scripts/clients` has set up their environments."""

from collections.abc import Iterator

import pytest

from tests.clients.run import CLIENTS, exercise
from tests.infra.stack import Stack, running_demo_stack

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1_000)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_demo_stack() as stack:
        yield stack


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_does_what_it_does_elsewhere(name: str, stack: Stack) -> None:
    """Each exercise works, or is refused as not supported yet."""
    client = CLIENTS[name]
    if not client.is_ready:
        pytest.skip(f"no environment: scripts/clients {name}")
    results = exercise(client, stack.url)
    assert [line for line in results if line["error"]] == []
