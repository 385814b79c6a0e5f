"""Which promise a model's card makes for jobs that go on after their worker's death."""

from itertools import permutations
from typing import get_args

import pytest

from contract.jobs import ResumeKind, resume_kind, weakest_resume


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_exact_is_said_only_where_tests_show_it(
    device: str, dtype: str, is_batch_invariant: bool
) -> None:
    """float32 on a CPU, or kernels that do not depend on the batch. The CPU's are never said to be
    such."""
    is_exact = (device, dtype) == ("cpu", "float32") or (device == "cuda" and is_batch_invariant)
    found = resume_kind(device, dtype, is_batch_invariant=is_batch_invariant)
    assert found == ("exact" if is_exact else "same-noise")


def test_the_weakest_holds_for_all() -> None:
    """exact, then same-noise, then distribution."""
    kinds: tuple[ResumeKind, ...] = get_args(ResumeKind)
    for number, weakest in enumerate(kinds):
        for some in permutations(kinds[: number + 1]):
            assert weakest_resume(some) == weakest
