"""Another model in the same stack, by the copy of `Pool` that docs/deployment.md describes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from infra.aws.parameters import complete, loaded
from infra.aws.pool_service import PoolService, PoolWatch, build_parser, policy_of, workforce_of
from infra.aws.workforce import EcsService
from infra.embedded_redis import EmbeddedRedis
from tests.aws.conftest import Clock
from tests.aws.template import NESTED, ROOT, TEMPLATE, expanded
from tests.gateway.conftest import make_settings, running_gateway

pytestmark = pytest.mark.anyio

OTHER = "other"
OWN = {  # what the copy says of its own
    "Model: !Ref Model": "Model: s3://weights/other",
    "ServedModelName: !Ref ServedModelName": f"ServedModelName: {OTHER}",
    "MaxWorkers: !Ref MaxWorkers": "MaxWorkers: 2",
}


def with_second_pool(template: str) -> str:
    """template.yaml with the copy."""
    before, pool, after = template.partition("  Pool:")
    block, budget, after = after.partition("  Budget:\n")
    copy = f"  PoolOfOther:{block}"
    for old, new in OWN.items():
        assert copy.count(f"        {old}\n") == 1
        copy = copy.replace(f"        {old}\n", f"        {new}\n")
    assert before.count("        Models: !Ref ServedModelName") == 2
    before = before.replace(
        "        Models: !Ref ServedModelName",
        f'        Models: !Sub "${{ServedModelName}},{OTHER}"',
    )
    return before + pool + block + copy + budget + after


def given_to(part: str, template: str) -> dict[str, str]:
    """The parameters of a nested stack, by the defaults of the template; outputs of other stacks by
    their names."""
    defaults = complete({"VpcId": "v", "PrivateSubnetIds": "a,b", "Release": ""})
    defaults |= {name: f"example/{name}:1" for name in ("WorkerImageUri", "ServicesImageUri")}

    def value(found: Any) -> str:
        match found:
            case {"Ref": name}:
                return str(defaults.get(name, name))
            case {"Fn::Join": [separator, {"Ref": name}]}:
                assert separator == ","
                return defaults[name]
            case {"Fn::GetAtt": output}:
                return str(output).rpartition(".")[2]
            case {"Fn::Sub": text}:
                return str(text).replace("${ServedModelName}", defaults["ServedModelName"])
        return str(found)

    parameters = loaded(template)["Resources"][part]["Properties"]["Parameters"]
    return {name: value(found) for name, found in parameters.items()}


@pytest.mark.campaign
def test_the_linter_finds_nothing_in_the_copy(tmp_path: Path) -> None:
    """It compares the parameters with those that the nested templates declare."""
    for path in NESTED.values():
        copied = tmp_path / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(path.read_text())
    (tmp_path / "template.yaml").write_text(with_second_pool(TEMPLATE.read_text()))
    program = "from cfnlint.runner import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--include-checks", "I", "--template", "template.yaml"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.fixture
def pools(aws_environ: dict[str, str]) -> Iterator[dict[str, list[str]]]:
    """Both pools' stacks in moto, which knows neither managed machines nor the step that counts
    workers; the command line of each pool's service, by the stack's name."""
    cloudformation, ecs = boto3.client("cloudformation"), boto3.client("ecs")
    ecs.create_cluster(clusterName="Cluster")
    template, commands = with_second_pool(TEMPLATE.read_text()), {}
    written = loaded(NESTED["pool"].read_text())
    written = expanded(written, written["Mappings"], {})
    written.pop("Transform")  # `expanded` has made it
    kinds = ("AWS::ECS::TaskDefinition", "AWS::ECS::Service")
    resources = {n: one for n, one in written["Resources"].items() if one["Type"] in kinds}
    for one in resources.values():
        for name in ("CapacityProviderStrategy", "ExecutionRoleArn", "TaskRoleArn"):
            one["Properties"].pop(name, None)
        for container in one["Properties"].get("ContainerDefinitions", ()):
            container.pop("LogConfiguration")
    resources["WorkerService"]["Properties"]["DesiredCount"] = 0
    body = json.dumps(written | {"Resources": resources})
    for part in ("Pool", "PoolOfOther"):
        stack = f"batchway-{part}"
        given = [
            {"ParameterKey": name, "ParameterValue": value}
            for name, value in given_to(part, template).items()
        ]
        cloudformation.create_stack(StackName=stack, TemplateBody=body, Parameters=given)
        task = ecs.describe_task_definition(taskDefinition=f"{stack}-pool")["taskDefinition"]
        commands[stack] = task["containerDefinitions"][0]["command"]
    yield commands
    for stack in commands:
        ecs.delete_service(cluster="Cluster", service=f"{stack}-worker", force=True)
        cloudformation.delete_stack(StackName=stack)


async def test_each_pool_scales_by_its_own_model(
    pools: dict[str, list[str]],
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    functions: Functions,
) -> None:
    """Each starts at zero, and grows by calls of its own model, which gateways know from the stack;
    up to its own maximum."""
    services = {}
    for command in pools.values():
        given = build_parser().parse_args(command)
        policy = policy_of(given)
        watch = PoolWatch(redis_client, keys, given.model_name, tuple(policy.wait_targets_s))
        workforce = workforce_of(given, boto3.client)
        assert isinstance(workforce, EcsService)
        services[given.model_name] = PoolService(
            policy, watch, functions, workforce, emit=len, clock_s=Clock()
        )
    assert [*services] == ["demo", OTHER]

    async def sizes() -> list[int]:
        for service in services.values():
            await service.step()
        return [service.workforce.num_desired() for service in services.values()]

    assert await sizes() == [0, 0]
    models = given_to("Front", with_second_pool(TEMPLATE.read_text()))["Models"].split(",")
    settings = make_settings(redis_server.url, declared_models=tuple(models))
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            for model, expected in ((OTHER, [0, 1]), ("demo", [1, 1])):
                answer = await http.post("/v1/completions", json={"model": model, "prompt": "a"})
                assert answer.json()["error"]["code"] == "no_workers"
                assert await sizes() == expected
    assert [service.policy.max_workers for service in services.values()] == [8, 2]
