"""Blocks of a session whose tool runs stay for as long as its tenant's pauses have taken, within a
bound, and cost no other job anything."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.harness import Harness, Sizes, assert_oracle, job
from workers.ipc.messages import Request

_NUM_BLOCKS = 64
_OPENING = (80, 81)  # of an answer, as templates have it


class Sessions:
    """An engine, and the histories of sessions, which go on from their answers."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.harness = Harness(sizes or Sizes(num_blocks=_NUM_BLOCKS))
        self.requests: list[Request] = []
        self._histories: dict[str, tuple[int, ...]] = {}
        self._numbers = count()

    def serve(self, prompt: tuple[int, ...], tenant: str, *, calls_tool: bool = False) -> int:
        """Returns how many of the prompt's tokens were found in the cache."""
        request = job(f"job-{next(self._numbers)}", prompt, tenant=tenant, max_tokens=4)
        self.requests.append(request)
        self.harness.add(request)
        num_hits = self.harness.step().num_prefix_hits
        self.harness.run()
        if calls_tool:
            self.harness.engine.stop_choice(request.job_id, 1, 0, pauses=True)
        return num_hits

    def turn(self, name: str, tenant: str, *, calls_tool: bool = True, keeps: bool = True) -> int:
        """The next turn of a session. `keeps`: its template shows the last answer."""
        history = self._histories.get(name, tuple(name.ljust(12).encode()))
        prompt = (*history, *_OPENING)
        found = self.serve(prompt, tenant, calls_tool=calls_tool)
        answer = self.harness.output_ids[self.requests[-1].job_id, 0]
        self._histories[name] = (*prompt, *answer) if keeps else (*history, 7, 7)
        return found

    def others(self) -> None:
        """Distinct prompts of another tenant, more than the cache holds."""
        for _ in range(_NUM_BLOCKS // 8 + 1):
            self.serve((next(self._numbers), *range(100, 129)), "others")

    def wait(self, seconds: float) -> None:
        self.harness.now_s += seconds

    @property
    def num_retained(self) -> int:
        return self.harness.step().num_retained_blocks


def pause(sessions: Sessions, name: str, seconds: float, tenant: str = "ada") -> int:
    """A session whose tool runs beside others' traffic. Returns what its next turn finds."""
    sessions.turn(name, tenant)
    sessions.others()
    sessions.wait(seconds)
    return sessions.turn(name, tenant, calls_tool=False)


@pytest.mark.parametrize("calls_tool", [True, False])
def test_a_session_finds_its_prefix_after_a_tool_has_run(calls_tool: bool) -> None:
    """Not without a tool: then others' traffic has taken its blocks. Equal tokens either way."""
    sessions = Sessions()
    for _ in range(2):
        sessions.turn("session", "ada", calls_tool=calls_tool)
        sessions.others()
        sessions.wait(20.0)
    found = sessions.turn("session", "ada")
    assert found == (20 if calls_tool else 0)
    assert_oracle(sessions.harness, sessions.requests)


@pytest.mark.parametrize("keeps", [True, False])
def test_how_long_is_learnt_from_pauses_after_which_the_blocks_had_gone(keeps: bool) -> None:
    """Also where a template does not show the answer again. Of each tenant alone."""
    sessions = Sessions()
    sessions.turn("slow", "ada", keeps=keeps)
    sessions.wait(100.0)
    sessions.others()
    assert sessions.turn("slow", "ada", calls_tool=False) == 0
    for tenant, is_found in (("ada", True), ("bob", False)):
        sessions.turn(tenant, tenant)
        sessions.wait(100.0)
        sessions.others()
        assert (sessions.turn(tenant, tenant, calls_tool=False) > 0) == is_found


def test_short_pauses_are_learnt_and_long_ones_are_bounded() -> None:
    """From thirty seconds to one, once there are ten pauses; and up to ten minutes."""
    sessions = Sessions()
    for number in range(10):
        assert pause(sessions, f"{number}", 0.1) > 0
    sessions.turn("short", "ada")
    assert sessions.num_retained > 0
    sessions.wait(1.1)
    assert sessions.num_retained == 0
    for number in range(64):
        sessions.turn(f"l{number}", "ada")
        sessions.wait(500.0)
        sessions.turn(f"l{number}", "ada", calls_tool=False)
    sessions.turn("bounded", "ada")
    sessions.wait(599.0)
    assert sessions.num_retained > 0
    sessions.wait(2.0)
    assert sessions.num_retained == 0


def test_a_pause_of_more_than_ten_minutes_teaches_nothing() -> None:
    sessions = Sessions()
    pause(sessions, "over night", 30_000.0)
    sessions.turn("next", "ada")
    sessions.wait(31.0)
    assert sessions.num_retained == 0


def test_an_idle_engine_wakes_when_a_retention_ends() -> None:
    """What it reports as retained is true without work."""
    sessions = Sessions()
    sessions.turn("session", "ada")
    assert sessions.num_retained == 4
    sessions.harness.sleep()
    assert sessions.harness.now_s == 30.0
    assert sessions.num_retained == 0
    assert sessions.harness.engine.next_wake_s() is None


def test_a_new_session_with_the_same_beginning_ends_no_pause() -> None:
    """Nor does the very prompt of another tenant."""
    sessions = Sessions()
    sessions.turn("session", "ada")
    assert sessions.num_retained == 4
    found = sessions.serve((*b"sess", *range(16)), "ada")
    assert (found, sessions.num_retained) == (4, 4)
    sessions.serve((*sessions.requests[0].prompts[0], 1), "bob")
    assert sessions.num_retained == 4


def test_a_turn_that_calls_no_tool_lets_its_session_go() -> None:
    sessions = Sessions()
    sessions.turn("session", "ada")
    sessions.turn("session", "ada", calls_tool=False)
    assert sessions.num_retained == 0


def test_at_most_half_is_retained_and_the_tenant_with_most_loses_its_oldest() -> None:
    sessions = Sessions()
    sessions.turn("bob", "bob")
    for number in range(20):
        sessions.turn(f"{number}", "ada")
        assert sessions.num_retained <= _NUM_BLOCKS // 2
    assert sessions.num_retained > _NUM_BLOCKS // 2 - 6
    sessions.others()
    assert sessions.turn("bob", "bob") > 0
    assert sessions.turn("19", "ada") > 0
    assert sessions.turn("0", "ada") == 0


def test_a_job_that_needs_retained_blocks_gets_them_at_once() -> None:
    """Even all of them."""
    sessions = Sessions(Sizes(num_blocks=10, kv_high_water=1.0))
    sessions.turn("session", "ada")
    assert sessions.num_retained == 4
    sessions.harness.add(job("large", range(37), max_tokens=3, ignore_eos=True))
    assert sessions.harness.step().num_running == 1
    sessions.harness.run()
    assert sessions.num_retained == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(("a", "b", "c", "d")),
            st.sampled_from(("ada", "bob")),
            st.booleans(),
            st.booleans(),
            st.sampled_from((0.0, 0.5, 40.0)),
        ),
        max_size=24,
    ),
    num_blocks=st.integers(10, 40),
    num_kept_states=st.sampled_from((None, 8)),
)
def test_over_random_traces_others_are_reused_first(
    turns: list[tuple[str, str, bool, bool, float]], num_blocks: int, num_kept_states: int | None
) -> None:
    """And tokens are those without retention. `Harness.step` audits which blocks are retained."""
    sessions = Sessions(Sizes(num_blocks=num_blocks, num_kept_states=num_kept_states))
    blocks = sessions.harness.engine._blocks
    for name, tenant, calls_tool, keeps, seconds in turns:
        if len(sessions._histories.get(f"{tenant} {name}", ())) <= 20:
            sessions.turn(f"{tenant} {name}", tenant, calls_tool=calls_tool, keeps=keeps)
        sessions.wait(seconds)
        pauses = blocks.retention._pauses
        assert blocks.retention.keys == Counter(key for pause in pauses for key in pause.keys)
        assert len(blocks.retention.keys) == blocks.retention._num_keys.total() <= num_blocks // 2
    assert_oracle(sessions.harness, sessions.requests)
    num_retained, num_others = sessions.num_retained, blocks.num_free - len(blocks.retained_ids)
    for num_taken in range(1, num_blocks + 1):
        blocks._take()
        assert len(blocks.retained_ids) == num_retained - max(0, num_taken - num_others)
