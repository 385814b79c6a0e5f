"""The number of wanted workers as a metric, which another scaler follows."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
import yaml  # type: ignore[import-untyped]

from contract.functions import Functions
from contract.keys import Keys
from contract.starts import ANY_LANE, Starts
from contract.telemetry.metrics_reader import MetricsSamples
from infra.aws.pool_service import PoolService, PoolWatch, build_parser, emitter_of, workforce_of
from infra.aws.workforce import EcsService, OtherScaler
from infra.embedded_redis import EmbeddedRedis
from infra.pool import PoolPolicy
from tests.aws.conftest import Clock
from tests.aws.test_pool_service import ecs
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model
from tests.infra.test_alert_rules import PROMTOOL, promtool
from tests.markdown import code_blocks

__all__ = ["ecs"]
pytestmark = pytest.mark.anyio

POLICY = PoolPolicy(wait_targets_s={"interactive": 5.0, "standard": 60.0}, scale_in_after_s=60.0)
NAMES = ("w1", "w2", "w3")
BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}
JOB = {"endpoint": "/v1/completions", "body": BODY}


async def wanted(http: httpx.AsyncClient) -> float | None:
    """What Prometheus reads of the model; None where there is no series."""
    samples = MetricsSamples.parse((await http.get("/metrics")).text)
    found = samples.series("pool_workers_wanted")
    assert len(found) <= 1
    return samples.value("pool_workers_wanted", model_name=MODEL) if found else None


@pytest.mark.campaign
async def test_ecs_and_any_other_scaler_follow_one_decision(
    ecs: EcsService,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    functions: Functions,
) -> None:
    """From zero, for a model that no worker has announced, through growth, to zero: the metric is
    ECS's desired count. The service that resizes nothing decides the same and drains nobody."""
    clock = Clock()
    watch = PoolWatch(redis_client, keys, MODEL, tuple(POLICY.wait_targets_s))

    def service(workforce: EcsService | OtherScaler) -> PoolService:
        return PoolService(POLICY, watch, functions, workforce, emit=len, clock_s=clock)

    pools = service(ecs), service(OtherScaler())
    sizes = []
    settings = make_settings(redis_server.url, declared_models=(MODEL,))
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:

            async def orders() -> list[Any]:
                return [await redis_client.hget(keys.of("worker", n), "order") for n in NAMES]

            async def step() -> None:
                before = await orders()
                decisions = [(await pools[1].step()).num_workers]
                assert await orders() == before
                decisions.append((await pools[0].step()).num_workers)
                assert set(decisions) == {ecs.num_desired()} == {await wanted(http)}
                sizes.append(decisions[0])
                clock.now_s += 5.0

            assert await wanted(http) is None  # nobody has decided yet
            await step()
            assert (await http.post("/v1/completions", json=BODY)).status_code == 503
            await step()
            await publish_model(redis_client, keys)
            await FakeWorker(functions, incarnation=NAMES[0]).beat()
            await step()
            many = {"expected_output_tokens": 300, "max_tokens": 300}
            big = JOB | {"body": BODY | {"prompt": ["ab"] * 60} | many}
            queued = (await http.post("/v1/jobs", json=big | {"lane": "interactive"})).json()
            await step()
            await http.post(f"/v1/jobs/{queued['id']}/cancel")
            for name in NAMES[1:]:
                await FakeWorker(functions, incarnation=name).beat()
            await redis_client.delete(keys.of("wanted", MODEL, ANY_LANE))
            for _ in range(14):
                await step()
            assert sizes[:2] == [0, 1]
            assert max(sizes) == len(NAMES)
            assert sizes[-1] == 0
            assert await orders() == [b"drain"] * len(NAMES)


async def test_a_decision_is_forgotten_when_its_service_is_gone(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """After a minute: a scaler would follow it for ever."""
    await publish_model(redis_client, keys)
    starts = Starts(redis_client, keys)
    await starts.decide(MODEL, 3)
    with running_gateway(make_settings(redis_server.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            assert await wanted(http) == 3
            key = keys.of("pool", MODEL)
            value: Any = await redis_client.hget(key, "num_wanted")
            num, at_ms = value.split()
            await redis_client.hset(key, "num_wanted", f"3 {int(at_ms) - 60_000}")
            assert await wanted(http) is None
            await redis_client.hset(key, "num_wanted", "three")
            assert await wanted(http) is None
    assert num == b"3"


def scaled_object() -> dict[str, Any]:
    """What docs/scaling.md gives to KEDA."""
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    [found] = [block.text for block in code_blocks(text) if "kind: ScaledObject" in block.text]
    return dict(yaml.safe_load(found))


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: scripts/setup says why")
async def test_prometheus_answers_kedas_query_with_the_decision(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys, tmp_path: Path
) -> None:
    """One number of several gateways, of which one is scraped before a new decision, and of several
    models. Without a decision there is no answer, which is not zero."""
    for model in (MODEL, "other"):
        await publish_model(redis_client, keys, model)
    starts = Starts(redis_client, keys)
    pages = []
    with running_gateway(make_settings(redis_server.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            for num in (3, 4):
                await starts.decide(MODEL, num)
                await starts.decide("other", 9)
                page = (await http.get("/metrics")).text
                pages.append(
                    re.findall(r"^(batchway_pool_workers_wanted)\{(.*)\} (\S+)$", page, re.M)
                )
    # Each gateway's page at minutes 0 and 1, with the labels that Prometheus adds; then no series.
    series: dict[str, list[str]] = {}
    for gateway, seen in (("a:8000", (0, 1)), ("b:8000", (1, 1))):
        for name, labels, value in (one for number in seen for one in pages[number]):
            whole = f'{name}{{{labels},job="gateway",instance="{gateway}"}}'
            series.setdefault(whole, []).append(value)
    assert len(series) == 4
    query = scaled_object()["spec"]["triggers"][0]["metadata"]["query"].replace("NAME", MODEL)
    answers = [
        {"expr": query, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": 4}]}
        for minute in (0, 1)
    ]
    answers.append({"expr": query, "eval_time": "8m", "exp_samples": []})
    given = [{"series": name, "values": " ".join(values)} for name, values in series.items()]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": answers}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    promtool("test", "rules", str(path))


def test_keda_takes_the_decision_as_it_is() -> None:
    """Only fields of KEDA's specification, which lets unknown ones pass in silence: so many pods as
    the query says, from zero, at once. An empty answer is an error, at which it leaves the pods;
    by default it would be zero and end all.

    https://keda.sh/docs/latest/reference/scaledobject-spec/, …/scalers/prometheus/
    """
    found = scaled_object()
    assert (found["apiVersion"], found["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = found["spec"]
    assert spec.keys() == {
        "scaleTargetRef", "minReplicaCount", "cooldownPeriod", "advanced", "triggers",
    }  # fmt: skip
    assert spec["scaleTargetRef"].keys() == {"name"}
    assert spec["minReplicaCount"] == spec["cooldownPeriod"] == 0
    down = {"stabilizationWindowSeconds": 0}
    autoscaler = {"behavior": {"scaleDown": down}}
    assert spec["advanced"] == {"horizontalPodAutoscalerConfig": autoscaler}
    [trigger] = spec["triggers"]
    assert trigger.pop("type") == "prometheus"
    asked = trigger.pop("metadata")
    assert trigger == {}  # no metricType: the query's value by threshold is the number of pods
    assert asked.pop("serverAddress").startswith("http://")
    assert "wanted" in asked.pop("query")
    assert asked == {"threshold": "1", "ignoreNullValues": "false"}  # Kubernetes takes texts only


def test_the_service_needs_no_aws_to_decide_only() -> None:
    """It begins with the workers that live, and prints no metrics."""
    given = build_parser().parse_args(["--decide-only", "--model-name=m"])
    scaler = workforce_of(given, pytest.fail)
    assert isinstance(scaler, OtherScaler)
    scaler.keep(["w1", "w2"])
    scaler.keep([])
    assert scaler.num_desired() == 2
    emitter_of(given)("a line")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--decide-only", "--ecs-service=s", "--model-name=m"])
