"""The speed that a worker reports. The clock is the tests' own."""

from workers.ipc.messages import EngineLoad, EngineOptions
from workers.supervisor.holding import EngineLink, Speed


def rate(speed: Speed) -> float:
    return speed.capacity(0, 0, {}).tokens_per_s


def test_only_a_full_worker_measures_its_rate() -> None:
    """A window with free places does not show what the worker can do."""
    speed = Speed()
    speed.measure(0.0, 0, has_room=True)
    speed.measure(2.0, 100, has_room=False)
    assert rate(speed) == 0.0  # it had room when the window began
    speed.measure(4.0, 500, has_room=False)
    assert rate(speed) == 200.0
    speed.measure(6.0, 700, has_room=False)
    assert rate(speed) == 150.0  # half old, half new


def test_an_unfilled_worker_only_learns_that_it_is_faster() -> None:
    """Less work does not mean less speed, but a higher rate than known does mean more."""
    speed = Speed()
    speed.measure(0.0, 0, has_room=False)
    speed.measure(1.0, 100, has_room=False)
    speed.measure(2.0, 200, has_room=False)
    speed.note_room()
    speed.measure(4.0, 210, has_room=False)
    assert rate(speed) == 100.0
    speed.note_room()
    speed.measure(5.0, 510, has_room=False)
    assert rate(speed) == 300.0


def test_a_full_worker_whose_batch_gives_way_could_do_more() -> None:
    link = EngineLink(EngineOptions(model_path=""))
    link.speed.begin(1000.0)
    link.speed.measure(0.0, 0, has_room=False)
    link.note_step(EngineLoad(num_running=1, num_step_tokens=1, step_s=0.1, gives_way=True), 0.5)
    link.speed.measure(1.0, 100, has_room=False)
    assert rate(link.speed) == 1000.0


def test_a_rate_measured_at_load_holds_until_a_full_worker_has_another() -> None:
    speed = Speed()
    speed.begin(1000.0)
    assert rate(speed) == 1000.0
    speed.measure(0.0, 0, has_room=False)
    speed.measure(1.0, 500, has_room=False)
    assert rate(speed) == 750.0
    speed.begin(1000.0)  # the engine was started again
    assert rate(speed) == 750.0


def test_a_stream_gets_a_token_a_step() -> None:
    """Its rate is the inverse of the mean step duration, in which the newest step has a weight of
    one twentieth."""
    speed = Speed()
    speed.note_step(0.1)
    assert speed.capacity(0, 0, {}).stream_tokens_per_s == 10.0
    speed.note_step(0.5)
    assert speed.capacity(0, 0, {}).stream_tokens_per_s == 8.333
