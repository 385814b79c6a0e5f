"""Fair shares, over random orders of work."""

import random

import pytest

from contract.fair_shares import FairShares

LARGEST = 9.0


@pytest.mark.parametrize("seed", range(20))
def test_names_with_work_differ_by_their_largest_pieces(seed: int) -> None:
    """By weight, from when both have work, whenever each came."""
    chance = random.Random(seed)
    shares = FairShares[str]()
    weights = {name: chance.choice([0.5, 1.0, 4.0]) for name in "abcd"}
    live = dict[str, int]()
    since = dict[tuple[str, str], tuple[float, float]]()
    served = dict.fromkeys(weights, 0.0)
    for _ in range(600):
        name = chance.choice("abcd")
        if chance.random() < 0.2:
            shares.arrive(name, weights[name])
            live[name] = live.get(name, 0) + 1
            if live[name] == 1:
                for other in live:
                    since[name, other] = served[name], served[other]
                    since[other, name] = served[other], served[name]
        elif live and chance.random() < 0.2:
            gone = chance.choice(sorted(live))
            shares.leave(gone)
            live[gone] -= 1
            if not live[gone]:
                del live[gone]
        if not live:
            continue
        first = min(live, key=shares.served.__getitem__)
        amount = chance.uniform(1.0, LARGEST)
        shares.charge(first, amount)
        served[first] += amount / weights[first]
        for (one, other), (of_one, of_other) in since.items():
            if one in live and other in live and one != other:
                ahead = (served[one] - of_one) - (served[other] - of_other)
                assert ahead <= LARGEST / weights[one] + LARGEST / weights[other] + 1e-6


def test_idle_time_earns_nothing_and_nothing_is_kept_of_those_who_left() -> None:
    shares = FairShares[int]()
    shares.arrive(0)
    for name in range(1, 100):
        shares.arrive(name)
        shares.charge(name, 1.0)
        shares.leave(name)
    shares.charge(0, 50.0)
    shares.arrive(1)
    assert shares.served[1] == 50.0
    shares.leave(1)
    shares.leave(0)
    assert not shares.served
