"""`batchway bench serve` against a scripted server: every call is counted once, by its outcome."""

import csv
import io
import json
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from infra.measure.load import Call, Load, LoadClient, LoadRun, Outcome, run_load
from infra.measure.plots import draw_runs
from infra.measure.serve import Slo, load_tables, make_loads, summarise_load, write_csv
from infra.measure.workloads import (
    BadWorkload,
    Workload,
    WorkloadRequest,
    draw_arrivals,
    read_trace,
)
from infra.parser import build_parser
from infra.tables import progress_line
from tests.bench import scripted_server as script
from tests.bench.scripted_server import ScriptedServer, WatchedClock
from tests.infra.test_keeper import Terminal

pytestmark = pytest.mark.anyio

ALL = (
    *(script.ANSWER, script.SHED, script.FAIL, script.BREAK, script.STALL, script.CANCEL),
    *(script.REFUSE, script.CUT, script.SPLIT),
)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with script.scripted_server(WatchedClock()) as server:
        yield server


async def run(server: ScriptedServer, load: Load, *, is_plain: bool = False) -> LoadRun:
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        caller = LoadClient(client, "scripted", is_plain=is_plain)
        return await run_load(caller, load, clock_s=server.clock, sleep=server.clock.sleep)


def one_by_one(*scripts: int, num_tokens: int = 6) -> Load:
    requests = tuple(WorkloadRequest((what, 5, 6), num_tokens) for what in scripts)
    return Load(Workload(requests), is_open=False, max_concurrency=1)


async def test_calls_are_counted_by_the_servers_outcomes(server: ScriptedServer) -> None:
    """Answers, rejections, cancelled and broken streams; tokens of complete and of broken
    answers."""
    done = await run(server, one_by_one(*ALL * 3))

    found = summarise_load(done, Slo())
    for outcome in Outcome:
        assert found[f"num_{outcome}"] == server.counts[outcome], outcome
    assert sum(found[f"num_{outcome}"] for outcome in Outcome) == len(ALL) * 3
    assert found["output_tokens_received"] == server.counts["tokens"]
    assert found["output_tokens"] == 6 * server.counts["succeeded"] == 54
    assert found["prompt_tokens"] == 3 * server.counts["succeeded"]
    assert found["reasons"] == {
        "cancelled: cancelled": 3,
        "failed: 400 bad": 3,
        "failed: RemoteProtocolError": 3,
        "failed: ended early": 3,
        "failed: engine_error": 3,
        "shed: lane_full": 3,
    }
    assert "secret" not in json.dumps(found)


async def test_latencies_are_exact(server: ScriptedServer) -> None:
    """First token, gaps, a stall, the whole answer, and which calls meet the objective."""
    done = await run(server, one_by_one(script.ANSWER, script.STALL))

    plain, stalled = done.calls
    assert plain.ttft_s == plain.ttft_from_sending_s == script.TTFT_S
    assert plain.itls_s == [script.ITL_S] * 5
    assert plain.e2e_s == script.TTFT_S + 5 * script.ITL_S
    assert stalled.itls_s == [script.STALL_S + script.ITL_S, *[script.ITL_S] * 4]
    assert stalled.mean_itl_s == pytest.approx((script.STALL_S + 5 * script.ITL_S) / 5)
    found = summarise_load(done, Slo(ttft_s=0.5, itl_s=1.0))
    assert found["itl_s"]["p50"] == script.ITL_S
    assert found["itl_s"]["max"] == script.STALL_S + script.ITL_S
    assert (found["num_within_slo"], found["wall_s"]) == (1, plain.e2e_s + stalled.e2e_s)
    assert found["goodput_requests_per_s"] == 1 / found["wall_s"]
    assert summarise_load(done, Slo(ttft_s=0.49))["num_within_slo"] == 0


async def test_open_loop_latencies_count_from_arrival(server: ScriptedServer) -> None:
    """The wait for --max-concurrency is included."""
    requests = tuple(WorkloadRequest((script.ANSWER,), 3, float(at_s)) for at_s in (2, 1, 3))
    load = Load(Workload(requests), is_open=True, max_concurrency=1)

    done = await run(server, load)

    assert [call.arrival_s for call in done.calls] == [2, 1, 3]
    in_order = sorted(done.calls, key=lambda call: call.arrival_s)
    for call, before in zip(in_order[1:], in_order, strict=False):
        assert call.sent_s >= max(call.arrival_s, before.end_s)
        assert call.ttft_from_sending_s == script.TTFT_S
        assert call.ttft_s == call.sent_s - call.arrival_s + script.TTFT_S
    assert summarise_load(done, Slo())["sent_late_s"]["max"] > 0


async def test_some_callers_disconnect(server: ScriptedServer) -> None:
    """Their calls count as cancelled, with the tokens received by then; the others succeed."""
    requests = tuple(WorkloadRequest((script.ANSWER, i), 8) for i in range(20))
    load = Load(Workload(requests), False, 1, hang_up_share=0.5, seed=3)

    done = await run(server, load)

    left = [call for call in done.calls if call.outcome is Outcome.CANCELLED]
    assert 4 < len(left) < 16
    assert all(1 <= call.num_output_tokens <= 4 for call in left)
    whole = [call for call in done.calls if call not in left]
    assert all(call.outcome is Outcome.SUCCEEDED for call in whole)
    assert server.counts["succeeded"] == len(whole)


async def test_an_absent_server_fails_every_call() -> None:
    """With the name of the error and without a traceback."""
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1/v1") as client:
        done = await run_load(LoadClient(client, "m"), one_by_one(script.ANSWER, script.ANSWER))
    assert summarise_load(done, Slo())["reasons"] == {"failed: ConnectError": 2}


async def test_plain_calls_send_only_parameters_of_openai(server: ScriptedServer) -> None:
    await run(server, one_by_one(script.ANSWER))
    await run(server, one_by_one(script.ANSWER), is_plain=True)

    extended, plain = server.bodies
    assert set(extended) - set(plain) == {"ignore_eos", "return_token_ids"}


def finished_runs() -> list[LoadRun]:
    """Two invented runs, with a call of each outcome."""
    runs = []
    for rate in (2.0, 4.0):
        calls = []
        for number, outcome in enumerate(Outcome):
            times = [number + 0.5, number + 0.7, number + 1.0] if number != 1 else []
            calls.append(
                Call(number, 3, float(number), number + 0.1, number + 1.5, outcome, "", 200)
            )
            calls[-1].chunk_times_s, calls[-1].num_output_tokens = times, len(times)
        load = Load(Workload(()), True, None, rate)
        runs.append(LoadRun(load, tuple(calls), 5.0))
    return runs


def test_throughput_and_latency_are_in_separate_tables() -> None:
    """Every load has a row in each."""
    text = load_tables([summarise_load(run, Slo(1.0, 1.0)) for run in finished_runs()])

    counts, rates, *latencies = text.split("\n\n")
    assert "succeeded" in counts
    assert "tokens/s" in rates
    assert "ms" not in rates
    assert len(latencies) == 2
    assert not any("/s " in part.split("\n", 1)[1] for part in latencies)
    assert "500.0" in latencies[0]
    assert "400.0" in latencies[0]


def test_the_csv_has_a_row_for_each_request(tmp_path: Path) -> None:
    write_csv(finished_runs(), tmp_path / "out.csv")

    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == [str(outcome) for outcome in Outcome] * 2
    assert rows[0]["ttft_s"] == "0.5"
    assert rows[1]["ttft_s"] == rows[1]["max_itl_s"] == ""
    assert {row["rate_per_s"] for row in rows} == {"2.0", "4.0"}


@pytest.mark.parametrize("num_runs", [0, 1, 2])
def test_a_chart_is_drawn(num_runs: int, tmp_path: Path) -> None:
    """Also if a load had no answers at all."""
    runs = finished_runs()[:num_runs]
    shed = [Call(0, 3, 0.0, 0.0, 0.1, Outcome.SHED)]
    runs.append(LoadRun(Load(Workload(()), True, None, 9.0), tuple(shed), 1.0))

    draw_runs(runs, [summarise_load(run, Slo()) for run in runs], tmp_path / "out.png")

    head = (tmp_path / "out.png").read_bytes()
    assert head.startswith(b"\x89PNG")
    assert len(head) > 20_000


@pytest.mark.parametrize(
    ("process", "burstiness", "variation"),
    [("poisson", 9.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5), ("constant", 1.0, 0.0)],
)
def test_gaps_between_arrivals_have_the_distribution(
    process: str, burstiness: float, variation: float
) -> None:
    """The mean is 1 / rate; deviation / mean is 1 / sqrt(shape)."""
    arrivals = draw_arrivals(20_000, 50.0, process, burstiness, "s")  # type: ignore[arg-type]
    gaps = [b - a for a, b in zip([0.0, *arrivals], arrivals, strict=False)]

    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) * 50 == pytest.approx(variation, rel=0.08, abs=1e-6)
    assert arrivals == draw_arrivals(20_000, 50.0, process, burstiness, "s")  # type: ignore[arg-type]


def loads_of(*arguments: str) -> list[Load]:
    return make_loads(build_parser().parse_args(["bench", "serve", *arguments]))


def test_options_become_loads(tmp_path: Path) -> None:
    """Closed by default; open with rates, each with its own prompts; a trace unchanged."""
    [closed] = loads_of("--requests", "7", "--prompt-tokens", "4:9", "--output-tokens", "5")
    assert (closed.is_open, closed.max_concurrency) == (False, 16)
    assert len(closed.workload.requests) == 7
    assert {r.max_tokens for r in closed.workload.requests} == {5}
    assert all(4 <= len(r.prompt_token_ids) <= 9 for r in closed.workload.requests)

    slow, fast = loads_of("--rate", "2", "4", "--requests", "300")
    assert (slow.is_open, slow.max_concurrency, slow.rate_per_s) == (True, None, 2.0)
    assert slow.workload.requests[-1].arrival_s > fast.workload.requests[-1].arrival_s
    assert slow.workload.requests[0].prompt_token_ids != fast.workload.requests[0].prompt_token_ids

    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,max_tokens\n3,5,2\n1.5,7,4\n")
    [traced] = loads_of("--trace", str(trace))
    assert [
        (request.arrival_s, len(request.prompt_token_ids), request.max_tokens)
        for request in traced.workload.requests
    ] == [(1.5, 7, 4), (3.0, 5, 2)]
    assert traced.is_open


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("arrival_s,prompt_tokens,max_tokens\n", "has no requests"),
        ("arrival_s,prompt_tokens\n1,2\n", "line 2: wants the columns"),
        ("arrival_s,prompt_tokens,max_tokens\n1,2,3\nnan,2,3\n", "line 3: at least 0 seconds"),
        ("arrival_s,prompt_tokens,max_tokens\n1,0,3\n", "line 2: at least"),
    ],
)
def test_errors_name_the_wrong_line_of_a_trace(text: str, reason: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(BadWorkload, match=reason):
        read_trace(trace, 256, "s")


def test_progress_is_shown_on_terminals_only() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        show = progress_line("requests", stream)
        show(1, 2)
        show(2, 2)
    half, whole = terminal.getvalue().split("\r")[1:]
    assert half.count("#") == whole.count("#") / 2 == 15
    assert whole.endswith("2 of 2 requests\n")
    assert file.getvalue() == ""
