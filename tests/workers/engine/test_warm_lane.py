"""The lane of prompts that are computed before anybody asks: short steps, and no trace in what the
engine has learnt of jobs."""

from contract.jobs import SamplingParams
from tests.fakes import VOCAB_SIZE, HashModel, HashModelOptions
from workers.engine.admission_check import RecentLengths
from workers.engine.engine import Engine
from workers.engine.interface import Chunk, EngineLimits
from workers.engine.order import Lanes
from workers.engine.retention import Retention
from workers.engine.sequence import Sequence, sequences_of
from workers.engine.strategy import ContinuousBatching
from workers.ipc.messages import Request
from workers.lanes import DEFAULT_LANES, WARM, lanes_of

ONE = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


def request(lane: str, num_tokens: int = 1000, epoch: int = 0) -> Request:
    prompt = tuple(n % 250 for n in range(num_tokens))
    return Request(f"{lane}-{num_tokens}", epoch, "t", lane, (prompt,), ONE, ((),), (False,))


class Seen(RecentLengths):
    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[str] = []

    def observe(self, sequence: Sequence) -> None:
        self.lanes.append(sequence.lane)


def test_a_job_waits_for_a_short_step_and_finds_the_cache() -> None:
    """Also where the budget of a step is large; its predicted output learns nothing of warming."""
    model = HashModel(HashModelOptions(max_model_len=2048, num_blocks=256))
    limits, lengths = EngineLimits(2048, 8, VOCAB_SIZE), Seen()
    engine = Engine(
        model,
        limits,
        ContinuousBatching(),
        lengths=lengths,
        lanes=lanes_of(()),
        clock_s=lambda: 0.0,
    )
    chunks: list[Chunk] = []
    for lane, num_tokens in ((WARM.name, 1000), ("standard", 1010), ("standard", 1020)):
        engine.add(request(lane, num_tokens))
        while engine.has_work:
            engine.step(chunks.extend)
            engine.audit()
    sizes: dict[str, list[int]] = {WARM.name: [], "standard": []}
    for chunk in chunks:
        sizes[chunk.sequence.lane].append(chunk.num_tokens)
    assert max(sizes[WARM.name]) == 128
    assert sum(sizes[WARM.name]) == 1000
    assert sizes["standard"] == [1010 - 62 * 16, 1020 - 63 * 16]
    assert lengths.lanes == ["standard", "standard"]


def test_other_lanes_have_no_limits_beside_it() -> None:
    """`batch` gives way to lanes that had work lately, not to this one."""
    lanes = Lanes([*DEFAULT_LANES, WARM], 100)
    for name in ("batch", WARM.name):
        [sequence] = sequences_of(request(name), frozenset(), 0)
        lanes.arrive(sequence)
    assert [*lanes.live_lately(0.0)] == ["batch"]
    assert [*lanes.live_lately(9.0)] == ["batch"]


def test_a_session_goes_on_with_its_next_job_alone() -> None:
    """What is retained while its tool runs stays so, and nothing is learnt from warming."""
    retention = Retention(64)
    [ended] = sequences_of(request("standard", 200), frozenset(), 0)
    ended.block_keys = [b"key"]
    retention.note_end(ended)
    retention.begin(ended.job_id, ended.epoch, 0)
    for lane, gone in ((WARM.name, []), ("standard", [b"key"])):
        [sequence] = sequences_of(request(lane, 300), frozenset(), 0)
        assert retention.end(sequence) == gone
