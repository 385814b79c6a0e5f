"""Draws requests and their arrivals: ten tenants on three lanes, one of which floods.

`Callers` sends the requests. Rates are shares of the measured capacity.
"""

import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from infra.measure.workloads import draw_arrivals
from tests.campaigns.load import Ask

FLOOD = "flood"
LIGHT = tuple(f"light-{number}" for number in range(1, 10))
TENANTS = (FLOOD, *LIGHT)

# Share of the capacity of all light tenants together: each is well below its tenth.
LIGHT_LOAD = 0.3
LIGHT_LANES: Mapping[str, float] = MappingProxyType(
    {"interactive": 0.7, "standard": 0.2, "batch": 0.1}
)
FLOOD_LANES: Mapping[str, float] = MappingProxyType(
    {"interactive": 0.1, "standard": 0.4, "batch": 0.5}
)
MIN_OUTPUT, MAX_OUTPUT = 2, 10
MEAN_OUTPUT = (MIN_OUTPUT + MAX_OUTPUT) / 2
_PROMPT = (8, 24)
MAX_JOB_TOKENS = _PROMPT[1] + MAX_OUTPUT


def draw(rng: random.Random, tenant: str, lanes: Mapping[str, float]) -> Ask:
    """A request of one tenant, in a random lane by the lanes' shares."""
    [lane] = rng.choices(list(lanes), list(lanes.values()))
    prompt_ids = [rng.randrange(32, 127) for _ in range(rng.randint(*_PROMPT))]
    return Ask(tenant, lane, prompt_ids, rng.randint(MIN_OUTPUT, MAX_OUTPUT))


def arrivals(
    seed: str, capacity_per_s: float, factor: float, duration_s: float
) -> Iterator[tuple[float, Ask]]:
    """Poisson arrivals at `factor` times the capacity: the light tenants' load, the rest the
    flood's."""
    rng, rate = random.Random(seed), factor * capacity_per_s
    for at_s in draw_arrivals(round(rate * duration_s), rate, "poisson", 1.0, seed):
        if rng.random() < LIGHT_LOAD / factor:
            yield at_s, draw(rng, rng.choice(LIGHT), LIGHT_LANES)
        else:
            yield at_s, draw(rng, FLOOD, FLOOD_LANES)
