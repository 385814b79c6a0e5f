"""The engine as in production on a virtual clock, with the time of a step in place of a model."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.measure.engine import Timeline, make_request, run_workload
from infra.measure.workloads import Workload as Requests
from infra.measure.workloads import WorkloadRequest, arriving, draw_arrivals
from infra.planning.costs import Costs
from infra.planning.devices import EngineCard, GpuSpec, Precision
from infra.planning.shapes import Sizes
from infra.tables import percentile
from workers.engine.engine import Engine
from workers.engine.interface import Chunk, Drawn, Padding, Row, Sample
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, StrategyOptions

if TYPE_CHECKING:
    from workers.engine.masks import StepMasks

_BLOCK_SIZE = 16
OUTPUT_ID = 1
_TOKEN, _EOS = Sample(OUTPUT_ID), Sample(0)
_SEED = 1


@dataclass(frozen=True, slots=True)
class Server:
    """A model on a device: how long a step takes, and how much KV there is room for."""

    sizes: Sizes
    device: GpuSpec
    engine: EngineCard
    memory_share: float

    @property
    def free_bytes(self) -> float:
        """Memory for KV: what weights and the largest step leave of the engine's share."""
        sizes = self.sizes
        taken = sizes.weight_bytes + sizes.activation_bytes(self.engine.step_tokens)
        return self.memory_share * self.device.memory_bytes - taken

    def largest_batch(self, length: int) -> int:
        """Sequences of this length whose KV fits, in whole blocks."""
        return max(0, int(self.free_bytes // self.sizes.kv_bytes(_in_blocks(length))))

    def steady_rate(self, work: "RequestLengths", batch: int) -> float:
        """Output tokens/s of so many streams, by a step in the middle of their outputs and by one
        prompt for each, without scheduling."""
        decode_s = self.step_s([Padding(work.isl + work.osl // 2, 1)] * batch)
        prompt_s = self.step_s([Padding(0, work.isl)]) - self.engine.step_s
        step_s = decode_s + self.engine.row_s * batch
        return batch * work.osl / (work.osl * step_s + batch * prompt_s)

    def step_s(self, chunks: Seq[Chunk | Padding]) -> float:
        """The time to read or to compute, whichever is longer (Williams et al., "Roofline", 2009),
        and the engine's own."""
        read, in_precision, in_two_bytes = self.sizes.demand(chunks)
        half: Precision = "bfloat16" if "bfloat16" in self.device.flops_per_s else "float16"
        flops = self.device.flops_per_s
        compute_s = in_precision / flops[self.sizes.precision] + in_two_bytes / flops[half]
        rows = sum(isinstance(chunk, Chunk) and chunk.samples for chunk in chunks)
        own_s = self.engine.step_s + self.engine.row_s * rows
        return max(read / self.device.bytes_per_s, compute_s) / self.engine.efficiency + own_s


def _in_blocks(length: int) -> int:
    return -(-length // _BLOCK_SIZE) * _BLOCK_SIZE


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class CostedModel:
    """A Model that draws the same token always, and takes its costs' time for it. The outputs of
    `lengths`, by job, end so early, with an end token."""

    eos_token_ids = frozenset({_EOS.token_id})
    shares_blocks = True
    num_state_slots = 0

    def __init__(
        self,
        costs: Costs,
        clock: VirtualClock,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_model_len = max_model_len
        self.lengths: dict[str, int] = {}
        self._costs = costs
        self._clock = clock

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: "StepMasks | None" = None
    ) -> list[Row]:
        self._clock.sleep(self._costs.step_s((*chunks, *padding) if padding else chunks))
        return [self._row(chunk) for chunk in chunks]

    def _row(self, chunk: Chunk) -> Row:
        if chunk.drafts:
            return Drawn((_TOKEN,) * len(chunk.sampled))
        if not chunk.samples:
            return None
        sequence = chunk.sequence
        length = self.lengths.get(sequence.job_id) if self.lengths else None
        is_over = length is not None and sequence.num_output + 1 >= length
        return _EOS if is_over else _TOKEN


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Prompts and outputs of these lengths in tokens; outputs differ by up to this share of it."""

    isl: int
    osl: int
    spread: float = 0.0

    @property
    def length(self) -> int:
        return self.isl + self.osl

    def request(self, rng: random.Random) -> WorkloadRequest:
        length = self.osl * rng.uniform(1 - self.spread, 1 + self.spread)
        return WorkloadRequest((2,) * self.isl, max(1, round(length)))


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A load and what callers see of it, by medians over the requests; times in seconds."""

    concurrency: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: float
    ttft_p99_s: float
    itl_s: float  # a request's mean time between its tokens
    e2e_s: float
    e2e_p99_s: float


def build(
    server: Server,
    work: RequestLengths,
    places: int,
    strategy: StrategyOptions,
    clock: VirtualClock,
) -> Engine:
    num_blocks = server.largest_batch(work.length) * _in_blocks(work.length) // _BLOCK_SIZE
    max_model_len = server.sizes.shape.max_model_len
    model = CostedModel(server, clock, num_blocks, _BLOCK_SIZE, max_model_len)
    options = EngineOptions(
        model_path="",
        max_num_seqs=places,
        kv_high_water=1.0,
        prefix_caching=False,
        strategy=strategy,
    )
    vocab_size = server.sizes.shape.vocab_size
    return build_engine(model, vocab_size, options, server.engine.step_tokens, clock_s=clock)


def closed_loop(
    server: Server,
    work: RequestLengths,
    concurrency: int,
    strategy: StrategyOptions | None = None,
) -> LoadPoint:
    """This many callers, each of which sends its next request when one has ended: three rounds, of
    which the second counts, because all begin at once."""
    clock = VirtualClock()
    engine = build(server, work, concurrency, strategy or StrategyOptions(), clock)
    lines = _serve(engine, work, clock, concurrency, 3 * concurrency)
    begun_s, ended_s = lines[concurrency].arrival_s, lines[2 * concurrency].arrival_s
    return _point(lines[concurrency : 2 * concurrency], ended_s - begun_s, concurrency)


def open_loop(
    server: Server,
    work: RequestLengths,
    places: int,
    rate_per_s: float,
    num_requests: int,
    seed: int,
) -> LoadPoint:
    """Requests at the times of a Poisson process; the first tenth is not counted."""
    clock, rng = VirtualClock(), random.Random(seed)
    engine = build(server, work, places, StrategyOptions(), clock)
    requests = Requests(tuple(work.request(rng) for _ in range(num_requests)))
    arrivals_s = draw_arrivals(num_requests, rate_per_s, "poisson", 1.0, str(seed))
    run = run_workload(engine, arriving(requests, arrivals_s), clock_s=clock, sleep=clock.sleep)
    counted = run.timelines[num_requests // 10 :]
    wall_s = clock() - counted[0].arrival_s
    held = sum(t.e2e_s for t in counted) / wall_s  # Little's law
    return _point(counted, wall_s, held)


def _serve(
    engine: Engine, work: RequestLengths, clock: VirtualClock, callers: int, num_requests: int
) -> list[Timeline]:
    """Runs all requests to their ends; each begins when a caller is free."""
    lines: list[Timeline] = []
    rng, held = random.Random(_SEED), 0
    while len(lines) < num_requests or engine.has_work:
        while len(lines) < num_requests and held < callers:
            lines.append(Timeline(clock()))
            engine.add(make_request(len(lines) - 1, work.request(rng)))
            held += 1
        wake_s = engine.next_wake_s()
        if wake_s is not None and wake_s > clock():
            clock.sleep(wake_s - clock())
            continue
        for output in engine.step().outputs:
            line = lines[int(output.job_id)]
            line.token_ids.append(output.token_id)
            line.times_s.append(clock())
            held -= output.finish_reason is not None
    return lines


def _point(lines: Seq[Timeline], wall_s: float, concurrency: float) -> LoadPoint:
    def share(values: list[float], of: float) -> float:
        found = percentile(values, of)
        assert found is not None
        return found

    ttfts, e2es = [t.ttft_s for t in lines], [t.e2e_s for t in lines]
    itls = [(t.e2e_s - t.ttft_s) / max(1, len(t.token_ids) - 1) for t in lines]
    return LoadPoint(
        concurrency=concurrency,
        output_tokens_per_s=sum(len(t.token_ids) for t in lines) / wall_s,
        requests_per_s=len(lines) / wall_s,
        ttft_s=share(ttfts, 0.5),
        ttft_p99_s=share(ttfts, 0.99),
        itl_s=share(itls, 0.5),
        e2e_s=share(e2es, 0.5),
        e2e_p99_s=share(e2es, 0.99),
    )
