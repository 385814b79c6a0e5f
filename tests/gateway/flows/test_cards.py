"""The cards of flows."""

import msgspec
import pytest

from contract.flows import Ensemble, Flow
from contract.jobs import Endpoint
from gateway.runners.flows.definitions import FlowError, flow_card
from tests.gateway.flows.model_files import CARDS

FLOW = Flow(
    definition=Ensemble(members=("small", "large"), combine="vote"), endpoints=(Endpoint.CHAT,)
)


def test_members_that_share_no_lane_are_refused() -> None:
    """Otherwise each call of the flow would fail."""
    cards = {
        name: msgspec.structs.replace(CARDS[name], lanes=lanes)
        for name, lanes in (("small", ("interactive", "batch")), ("large", ("standard", "batch")))
    }
    assert flow_card("both", FLOW, cards).lanes == ("batch",)
    cards["large"] = msgspec.structs.replace(cards["large"], lanes=("standard",))
    with pytest.raises(FlowError, match="both: its members share no lane: small serves"):
        flow_card("both", FLOW, cards)
