"""`batchway ab report`: the statistics on drawn jobs, the exit status, and a real A/B."""

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis

from contract.ab import CANDIDATE, CONTROL, AbJob, AbRecord
from contract.connection import connect
from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.library import ensure_library
from infra import cli
from infra.ab_command import candidate_arguments, check_candidate
from infra.ab_report import (
    METRICS,
    NOT_WORSE,
    TOO_FEW,
    UNCLEAR,
    WORSE,
    Terms,
    compare_arms,
    judge,
    notes,
    report_text,
)
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.contract.some_calls import append, make_job, make_submission, tokens
from tests.fakes import HashModelOptions
from tests.gateway.fake_worker import publish_model
from tests.infra.command_line import call_cli
from tests.infra.processes import wait_until
from tests.infra.stack import MODEL, Stack, running_stack
from tests.infra.test_cli import parse, run_cli

VERSIONS = {CONTROL: "aaaa", CANDIDATE: "bbbb"}
START_MS = 1_700_000_000_000


def draw_jobs(
    num: int,
    *,
    seed: int = 0,
    slowness: float = 1.0,
    lost_share: float = 0.0,
    jitter: float = 0.3,
) -> list[AbJob]:
    """Jobs of both arms in alternation, ten a second. The candidate's latencies are `slowness`
    times as long, and `lost_share` of its jobs expire. Each second has a speed for both arms."""
    rng, jobs, speed = random.Random(seed), list[AbJob](), 1.0
    for number in range(num):
        if number % 10 == 0:
            speed = rng.lognormvariate(0, jitter)
        arm = (CONTROL, CANDIDATE)[number % 2]
        factor = speed * (slowness if arm == CANDIDATE else 1.0)
        is_lost = arm == CANDIDATE and rng.random() < lost_share
        created = START_MS + 100 * number
        first = created + round(factor * rng.uniform(50, 150))
        jobs.append(
            AbJob(
                arm,
                VERSIONS[arm],
                VERSIONS[arm],
                "standard",
                JobStatus.EXPIRED if is_lost else JobStatus.SUCCEEDED,
                20,
                21,
                1,
                1,
                created,
                created + 1,
                first,
                first + round(factor * rng.uniform(190, 210)),
            )
        )
    return sorted(jobs, key=lambda job: job.finished_ms)


def record_of(jobs: Sequence[AbJob], share: float = 0.5) -> AbRecord:
    none = {CONTROL: 0, CANDIDATE: 0}
    return AbRecord(VERSIONS, share, tuple(jobs), none, {CONTROL: 1, CANDIDATE: 1})


def compare(jobs: Sequence[AbJob], terms: Terms | None = None, share: float = 0.5) -> Any:
    return compare_arms(record_of(jobs, share), jobs, terms or Terms())


@pytest.mark.parametrize(
    ("interval", "is_higher_better", "verdict"),
    [
        ((1.06, 1.20), False, WORSE),
        ((1.05, 1.20), False, UNCLEAR),
        ((0.90, 1.05), False, NOT_WORSE),
        ((0.90, 1.06), False, UNCLEAR),
        ((0.50, 0.60), False, NOT_WORSE),
        ((0.80, 0.94), True, WORSE),
        ((0.80, 0.96), True, UNCLEAR),
        ((0.96, 0.99), True, NOT_WORSE),
        ((1.50, 1.60), True, NOT_WORSE),
        (None, True, UNCLEAR),
    ],
)
def test_worse_is_what_lies_beyond_the_margin_with_its_whole_interval(
    interval: tuple[float, float] | None, is_higher_better: bool, verdict: str
) -> None:
    """And not worse is what lies within it with its whole interval."""
    assert judge(interval, 0.05, is_higher_better) == verdict


def test_estimates_are_those_of_the_jobs() -> None:
    """Percentiles, tokens by time and shares, computed here by hand."""
    jobs = draw_jobs(400, lost_share=0.25)
    found = compare(jobs)["metrics"]
    mine = [job for job in jobs if job.arm == CANDIDATE]
    good = [job for job in mine if job.status is JobStatus.SUCCEEDED]
    wall_s = (jobs[-1].finished_ms - min(job.created_ms for job in jobs)) / 1000
    ttfts = sorted(job.ttft_s or 0 for job in good)
    assert found["ttft_s_p50"][CANDIDATE]["estimate"] == ttfts[(len(ttfts) + 1) // 2 - 1]
    assert found["goodput"][CANDIDATE]["estimate"] == len(good) / len(mine)
    tokens = sum(job.num_output_tokens for job in good)
    assert found["output_tokens_per_s"][CANDIDATE]["estimate"] == pytest.approx(tokens / wall_s)
    assert found["itl_s_p50"][CONTROL]["estimate"] == pytest.approx(0.01, rel=0.3)


def test_a_slower_candidate_is_worse() -> None:
    """In its latencies alone; it produces as many tokens."""
    found = compare(draw_jobs(600, slowness=1.3, jitter=0.2))
    verdicts = {name: found["metrics"][name]["verdict"] for name in METRICS}
    assert found["verdict"] == WORSE
    assert verdicts["e2e_s_p50"] == verdicts["itl_s_p50"] == verdicts["ttft_s_p50"] == WORSE
    assert verdicts["output_tokens_per_s"] != WORSE
    assert verdicts["goodput"] == NOT_WORSE
    assert "worse by more than 5%: " in report_text(found)


def test_a_candidate_that_loses_jobs_is_worse() -> None:
    """In goodput and tokens; jobs without a success have no latency."""
    found = compare(draw_jobs(600, lost_share=0.2))
    worse = {name for name in METRICS if found["metrics"][name]["verdict"] == WORSE}
    assert worse == {"goodput", "output_tokens_per_s"}


def test_goodput_counts_jobs_within_the_bounds() -> None:
    """Half of the jobs have their first token within 100 ms."""
    found = compare(draw_jobs(400, jitter=0.0), Terms(ttft_s=0.1))
    assert found["metrics"]["goodput"][CONTROL]["estimate"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_equal_arms_are_not_worse(seed: int) -> None:
    """Whatever shook both of them: the interval of each ratio holds 1 or nearly so."""
    found = compare(draw_jobs(600, seed=seed, jitter=0.5), Terms(seed=seed, margin=0.1))
    assert found["verdict"] in (NOT_WORSE, UNCLEAR)


def test_disturbances_of_both_arms_widen_neither_ratio() -> None:
    """The bootstrap draws both arms' jobs of the same moments, as those had the same luck."""
    found = compare(draw_jobs(800, jitter=0.5))["metrics"]["itl_s_p50"]

    def width(side: str) -> float:
        low, high = found[side]["interval"]
        return float((high - low) / found[side]["estimate"])

    assert width("ratio") < width(CONTROL) / 3


def test_a_seed_gives_the_same_intervals() -> None:
    jobs = draw_jobs(200)
    assert compare(jobs) == compare(jobs)
    assert compare(jobs) != compare(jobs, Terms(seed=1))


def test_tokens_are_compared_for_equal_shares() -> None:
    """A candidate with a quarter of the jobs is not worse for a third of the tokens."""
    jobs = [job for n, job in enumerate(draw_jobs(1200)) if job.arm == CONTROL or n % 3 == 0]
    share = sum(job.arm == CANDIDATE for job in jobs) / len(jobs)
    found = compare(jobs, share=share)["metrics"]["output_tokens_per_s"]
    assert found["ratio"]["estimate"] == pytest.approx(1.0)


def test_few_jobs_have_no_verdict_and_no_tail() -> None:
    """Below --min-jobs nothing is judged; a 99th percentile needs five jobs beyond it."""
    few = compare(draw_jobs(150))
    assert (few["verdict"], few["metrics"]) == (TOO_FEW, {})
    assert "75 jobs ended in one arm, fewer than 100" in report_text(few)
    some = compare(draw_jobs(400, slowness=2.0))["metrics"]
    assert (some["e2e_s_p99"]["verdict"], some["e2e_s_p50"]["verdict"]) == (UNCLEAR, WORSE)


def test_an_unfair_comparison_is_pointed_out() -> None:
    """Unequal load, an arm that is behind, jobs that changed arms."""
    jobs = [job for job in draw_jobs(1000) if job.arm == CONTROL or job.created_ms % 400]
    crossed = [msgspec.structs.replace(jobs[0], served_by="cccc"), *jobs[1:]]
    assert notes(compare(draw_jobs(300))) == []
    unequal, behind, other = notes(compare_arms(record_of(crossed, 0.6), crossed, Terms()))
    assert "1 of 2 live workers run the candidate, with 60%" in unequal
    assert "60.0% were assigned to it: an arm is behind" in behind
    assert other.startswith("1 jobs were served by another version")


# --- the command ------------------------------------------------------------------------------


def plant(server: EmbeddedRedis, jobs: Sequence[AbJob], **versions: str) -> None:
    """Writes an A/B of the model `hash` as the functions do."""
    keys = Keys("test")
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        fields = {**VERSIONS, "share": "0.5", **versions}
        client.hset(keys.of("ab", "hash"), mapping=fields)
        for job in jobs:
            client.xadd(keys.of("ab_jobs", "hash"), {"j": msgspec.msgpack.encode(job)})

    async def publish() -> None:
        async with redis.asyncio.Redis.from_url(server.url) as own:
            await publish_model(own, keys)

    asyncio.run(publish())


@pytest.fixture
def environ(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", redis_server.url)
    monkeypatch.setenv("BATCHWAY_NAMESPACE", "test")


@pytest.mark.usefixtures("environ")
@pytest.mark.parametrize(
    ("slowness", "num", "status"), [(1.5, 300, 1), (0.5, 300, 0), (0.5, 150, 2)]
)
def test_the_exit_status_is_a_gate(
    redis_server: EmbeddedRedis,
    capsys: pytest.CaptureFixture[str],
    slowness: float,
    num: int,
    status: int,
) -> None:
    """1: worse, 0: not, 2: too few jobs. JSON and table say the same."""
    plant(redis_server, draw_jobs(num, slowness=slowness))
    assert cli.main(["ab", "report"]) == status
    shown = capsys.readouterr().out
    assert cli.main(["ab", "report", "--json=-"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "hash"
    assert found["arms"][CONTROL]["ended"] == num // 2
    assert shown.splitlines()[0] == "hash"
    assert {WORSE: 1, TOO_FEW: 2}.get(found["verdict"], 0) == status
    assert ("no verdict" in shown, "is worse by more" in shown) == (status == 2, status == 1)


@pytest.mark.usefixtures("environ")
def test_jobs_of_other_versions_lanes_and_times_are_left_out(
    redis_server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = draw_jobs(400)
    old = [msgspec.structs.replace(job, version="cccc") for job in jobs[:100]]
    other = [msgspec.structs.replace(job, lane="batch") for job in jobs[100:150]]
    plant(redis_server, [*old, *other, *jobs[150:]])
    assert cli.main(["ab", "report", "--lane=standard", "--json=-"]) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    assert sum(arm["ended"] for arm in arms.values()) == 250
    assert cli.main(["ab", "report", "--last-s=3600"]) == 2


@pytest.mark.usefixtures("environ")
def test_without_two_versions_there_is_no_report(
    redis_server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(redis_server, [], candidate="aaaa")
    assert cli.main(["ab", "report"]) == 2
    assert "both versions are the same configuration" in capsys.readouterr().err
    assert cli.main(["ab", "report", "--served-model-name=other"]) == 2
    assert "no worker has run a candidate" in capsys.readouterr().err


@pytest.mark.usefixtures("environ")
def test_a_candidate_that_runs_one_job_at_a_time_fails_the_gate(
    redis_server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the real functions on a clock of the test: every second four jobs come, the control ends
    all of its own, the candidate one. What it leaves waits for it alone."""
    plant(redis_server, [])
    asyncio.run(serve_unequally(redis_server, num_seconds=60))
    assert cli.main(["ab", "report", "--served-model-name=m", "--min-jobs=40", "--json=-"]) == 1
    found = json.loads(capsys.readouterr().out)
    worse = {name for name in METRICS if found["metrics"][name]["verdict"] == WORSE}
    assert {"output_tokens_per_s", "ttft_s_p50", "e2e_s_p50"} <= worse
    assert found["arms"][CANDIDATE]["open"] > found["arms"][CONTROL]["open"] == 0


async def serve_unequally(server: EmbeddedRedis, num_seconds: int) -> None:
    async with connect(server.url, Keys("test")) as client:
        await ensure_library(client)
        functions = Functions(client, Keys("test"))
        for second in range(num_seconds):
            await client.set(TEST_CLOCK, f"={START_MS + 1000 * second}")
            for arm, version in VERSIONS.items():
                said: dict[str, object] = {"batching": version}
                said |= {"candidate_share": 0.5} if arm == CANDIDATE else {}
                await functions.heartbeat(arm, "m", [], lease_s=10, info=json.dumps(said))
            for _ in range(4):
                await functions.submit(make_job(), make_submission(deadline_s=3600))
            await client.set(TEST_CLOCK, f"={START_MS + 1000 * second + 500}")
            await serve(functions, CONTROL, max_jobs=64)
            await serve(functions, CANDIDATE, max_jobs=1)
        await client.delete(TEST_CLOCK)


async def serve(functions: Functions, arm: str, max_jobs: int) -> None:
    """Claims jobs of an arm and ends them at once."""
    claimed = await functions.claim(
        arm,
        "m",
        ["standard"],
        lease_s=10,
        max_jobs=max_jobs,
        max_tokens=10**6,
        config_version=VERSIONS[arm] + " candidate" * (arm == CANDIDATE),
    )
    ends = [Append(c.job.id, c.epoch, 1, tokens(0, 1, 2), 2, JobStatus.SUCCEEDED) for c in claimed]
    await append(functions, arm, *ends)


# --- a real A/B -------------------------------------------------------------------------------


def write_files(folder: Path) -> tuple[str, str]:
    """Options of a control and a worse candidate: one sequence at a time."""
    control, candidate = folder / "batching.yaml", folder / "candidate.yaml"
    control.write_text("max_num_seqs: 16\n")
    candidate.write_text("max_num_seqs: 1\n")
    return f"--batching={control}", f"--candidate={candidate}"


@pytest.mark.parametrize(
    ("candidate", "arguments", "message"),
    [
        ("max_num_seq: 4\n", [], "candidate.yaml:1: max_num_seq: unknown key; did you mean"),
        ("max_num_seqs: 16  # too\n", [], "candidate.yaml: both files are the same configuration"),
        ("max_output_tokens: 5\n", [], "max_output_tokens: must be the same for the control"),
        ("lanes: {urgent: {priority: 0}}\n", [], "lanes.urgent: only one of control and candidate"),
        ("max_num_seqs: 1\n", ["--workers=1"], "--candidate needs --workers 2 or more"),
        ("max_num_seqs: 1\n", ["--candidate-share=0.3"], "is no whole number of workers"),
    ],
)
def test_an_unusable_candidate_is_refused_at_the_start(
    tmp_path: Path, candidate: str, arguments: list[str], message: str
) -> None:
    """With file, key and reason; nothing is started."""
    options = write_files(tmp_path)
    (tmp_path / "candidate.yaml").write_text(candidate)
    model = ("--engine-module=tests.hash_engine", "--model=hash", "--port=0")
    done = call_cli("up", *model, *options, "--workers=2", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "num", "share"),
    [
        ((), 2, "0.4"),
        (("--candidate-share=0.2",), 1, "0.2"),
        (("--candidate-share=0.8",), 4, "0.8"),
    ],
)
def test_the_candidate_gets_equal_shares_of_workers_and_jobs(
    tmp_path: Path, words: tuple[str, ...], num: int, share: str
) -> None:
    """Here of five workers; half of them, rounded down, where no share is given."""
    model = ("--model=hash", "--engine-module=tests.hash_engine")
    options = parse("up", *model, "--workers=5", *write_files(tmp_path), *words)
    assert check_candidate(options) == num
    assert candidate_arguments(options, num) == (
        f"--candidate={tmp_path / 'candidate.yaml'}",
        f"--candidate-share={share}",
    )


async def call_all(stack: Stack, num: int) -> None:
    """Makes calls, eight at a time."""
    body = {"model": MODEL, "prompt": "a prompt", "max_tokens": 20}
    permits = asyncio.Semaphore(8)
    async with httpx.AsyncClient(timeout=120) as client:

        async def call() -> int:
            async with permits:
                answer = await client.post(f"{stack.url}/v1/completions", json=body)
                return answer.status_code

        assert set(await asyncio.gather(*(call() for _ in range(num)))) == {200}


@pytest.mark.e2e
@pytest.mark.campaign
def test_both_configurations_serve_and_are_compared(tmp_path: Path) -> None:
    """Every call counts for one version, in the report and on the page of metrics."""
    model = HashModelOptions(step_s=0.002, eos_rate=0.0)
    with running_stack("--workers=2", *write_files(tmp_path), model=model) as stack:
        redis_url = stack.wait_for("| redis (of our own)").split()[-1]
        stack.wait_for("ready model=", 2)
        with redis.Redis.from_url(redis_url) as client:
            key = Keys().of("ab", MODEL)
            wait_until(lambda: None not in client.hmget(key, ["control", "candidate"]))
        asyncio.run(call_all(stack, 60))
        done = run_cli("ab", "report", "--redis-url", redis_url, "--min-jobs=10", "--json=-")
        found = json.loads(done.stdout)
        arms, metrics = found["arms"], httpx.get(f"{stack.url}/metrics").text
        assert done.returncode == (found["verdict"] == WORSE)
        assert arms[CONTROL]["succeeded"] + arms[CANDIDATE]["succeeded"] == 60
        for arm in arms.values():
            assert (arm["workers"], arm["open"], arm["served_by_other"]) == (1, 0, 0)
            labels = f'{{config="{arm["version"]}",model_name="{MODEL}",status="succeeded"}}'
            assert f"batchway_config_requests_total{labels} {arm['succeeded']:.1f}" in metrics
        assert stack.end() == 0
