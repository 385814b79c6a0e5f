"""template.yaml as CloudFormation gets it: after SAM's transform, not as it is written."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from gateway.aws.environment import SECRETS_VARIABLE
from gateway.settings import GatewaySettings, variable
from infra.aws import fleet_lines, pool_service
from infra.callbacks_command import AWS_VARIABLE, KEY_VARIABLE
from infra.parser import build_parser
from infra.redis_roles import REDIS_ROLES, acl_rules
from workers.callbacks.settings import MIN_KEY_CHARS

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATE = ROOT / "template.yaml"
PARTS = ("gateway", "worker", "callbacks", "pool", "housekeeper")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with CloudFormation's short forms of functions."""


def _function(loader: Any, suffix: str, node: Any) -> dict[str, Any]:
    name = suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}"
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        if suffix == "GetAtt":
            value = value.split(".", 1)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    return {name: value}


_Loader.add_multi_constructor("!", _function)


def written() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load(TEMPLATE.read_text(), _Loader)
    return loaded


@functools.cache
def transformed() -> dict[str, Any]:
    """What SAM makes of the template, with its parameters still in it."""
    from samtranslator.parser.parser import Parser
    from samtranslator.translator.translator import Translator

    template = written()
    for function in ("ApiFunction", "StreamFunction", "HousekeeperFunction"):
        code = "s3://bucket/gateway.zip"  # what `sam package` would put here
        template["Resources"][function]["Properties"]["CodeUri"] = code
    translator = Translator({}, Parser())
    made: dict[str, Any] = translator.translate(template, parameter_values={})
    return made


@pytest.fixture(autouse=True)
def region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")


def of_type(kind: str) -> dict[str, dict[str, Any]]:
    """Properties of all resources of a type, by name."""
    resources = transformed()["Resources"].items()
    return {name: found.get("Properties", {}) for name, found in resources if found["Type"] == kind}


def statements() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every statement of every policy that is written out, with the resource it belongs to."""
    for name, resource in transformed()["Resources"].items():
        properties = resource.get("Properties", {})
        documents = [policy["PolicyDocument"] for policy in properties.get("Policies", [])]
        if "PolicyDocument" in properties:
            documents.append(properties["PolicyDocument"])
        for document in documents:
            for statement in document["Statement"]:
                yield name, statement["Fn::If"][1] if "Fn::If" in statement else statement


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def paths() -> dict[str, Any]:
    [api] = of_type("AWS::ApiGateway::RestApi").values()
    found: dict[str, Any] = api["Body"]["paths"]
    return found


def integration(path: str, method: str) -> dict[str, Any]:
    found: dict[str, Any] = paths()[path][method]["x-amazon-apigateway-integration"]
    return found


def test_linters_find_nothing() -> None:
    """cfn-lint, with the warnings too."""
    program = "from cfnlint.runner import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--non-zero-exit-code", "informational", str(TEMPLATE)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions", "post"),
        ("/v1/completions", "post"),
        ("/v1/jobs/{job}/events", "get"),
    ],
)
def test_what_may_stream_is_streamed(path: str, method: str) -> None:
    """By the streaming invocation of Lambda, for as long as a function may run."""
    found = integration(path, method)
    uri, arguments = found["uri"]["Fn::Sub"]
    assert uri.endswith(
        ":lambda:path/2021-11-15/functions/${Function}/response-streaming-invocations"
    )
    assert found["responseTransferMode"] == "STREAM"
    assert found["timeoutInMillis"] == 900_000
    assert arguments["Function"] == {"Ref": "StreamFunctionAliaslive"}


def test_all_else_is_answered_at_once() -> None:
    """By the buffered function, and within the time that API Gateway waits for it."""
    found = integration("/{proxy+}", "x-amazon-apigateway-any-method")
    uri, arguments = found["uri"]["Fn::Sub"]
    assert uri.endswith(":lambda:path/2015-03-31/functions/${Function}/invocations")
    assert arguments["Function"] == {"Ref": "ApiFunctionAliaslive"}
    assert len(paths()) == 4
    timeout_s = of_type("AWS::Lambda::Function")["ApiFunction"]["Timeout"]
    assert timeout_s * 1000 <= found["timeoutInMillis"]


def test_functions_are_arm_and_one_starts_from_a_snapshot() -> None:
    """SnapStart works on published versions only, which the API calls by their alias."""
    functions = of_type("AWS::Lambda::Function")
    assert set(functions) == {"ApiFunction", "StreamFunction", "HousekeeperFunction"}
    for function in functions.values():
        assert function["Architectures"] == ["arm64"]
        assert function["Runtime"] == "python3.13"  # SnapStart takes 3.12 and later
        assert function["VpcConfig"]["SubnetIds"] == {"Ref": "PrivateSubnetIds"}
    assert functions["ApiFunction"]["SnapStart"] == {"ApplyOn": "PublishedVersions"}
    assert "SnapStart" not in functions["StreamFunction"]
    assert len(of_type("AWS::Lambda::Version")) == len(of_type("AWS::Lambda::Alias")) == 3


def test_streams_go_through_the_adapter_or_our_own_loop() -> None:
    """One parameter chooses both the layer and what is run instead of Lambda's loop."""
    function = of_type("AWS::Lambda::Function")["StreamFunction"]
    variables = function["Environment"]["Variables"]
    assert variables["AWS_LWA_INVOKE_MODE"] == "response_stream"
    wrapper = ["HasWebAdapter", "/opt/bootstrap", "/var/task/serve-stream"]
    assert variables["AWS_LAMBDA_EXEC_WRAPPER"]["Fn::If"] == wrapper
    [layer] = function["Layers"]
    assert layer["Fn::If"][0] == "HasWebAdapter"
    for script in ("serve-web", "serve-stream"):
        path = ROOT / "gateway" / "aws" / script
        assert path.stat().st_mode & 0o111
        module = re.search(r"-m (gateway\.aws\.\w+)", path.read_text())
        assert module is not None
        assert (ROOT / f"{module[1].replace('.', '/')}.py").exists()
    assert function["Handler"] == "serve-web"


def test_functions_are_given_settings_that_exist() -> None:
    """Every variable of ours is one that the gateway reads."""
    known = {variable(name) for name in GatewaySettings.__dataclass_fields__} | {SECRETS_VARIABLE}
    for name, function in of_type("AWS::Lambda::Function").items():
        given = set(function["Environment"]["Variables"])
        assert {v for v in given if v.startswith("BATCHWAY_")} <= known, name
        assert {"REDIS_URL", SECRETS_VARIABLE} <= given


def test_nothing_secret_is_in_clear() -> None:
    """Secrets are made by Secrets Manager, each for one role; what is passed on is their name."""
    made = of_type("AWS::SecretsManager::Secret")
    assert all("SecretString" not in secret for secret in made.values())
    assert all(secret["GenerateSecretString"]["PasswordLength"] >= 43 for secret in made.values())
    for function in of_type("AWS::Lambda::Function").values():
        for name, value in function["Environment"]["Variables"].items():
            assert "resolve:" not in json.dumps(value), name
            assert not re.search(r"PASSWORD|API_KEY|TOKEN", name)
    for task in of_type("AWS::ECS::TaskDefinition").values():
        for container in task["ContainerDefinitions"]:
            assert "resolve:" not in json.dumps(container["Environment"])
            assert not any("PASSWORD" in pair["Name"] for pair in container["Environment"])
    for user in of_type("AWS::ElastiCache::User").values():
        assert json.dumps(user["Passwords"]).count("{{resolve:secretsmanager:") == 1


def test_the_cache_is_a_queue_with_a_lock() -> None:
    """Evicts nothing, speaks TLS alone, knows a user for each part, and survives a zone."""
    [parameters] = of_type("AWS::ElastiCache::ParameterGroup").values()
    [cache] = of_type("AWS::ElastiCache::ReplicationGroup").values()
    users = of_type("AWS::ElastiCache::User")
    assert parameters["Properties"]["maxmemory-policy"] == "noeviction"
    assert cache["CacheParameterGroupName"] == {"Ref": "CacheParameters"}
    assert cache["Engine"] == "valkey"
    assert cache["TransitEncryptionMode"] == "required"
    assert cache["AtRestEncryptionEnabled"]
    assert cache["MultiAZEnabled"]
    assert cache["ClusterMode"] == "disabled"
    assert {user["UserName"] for user in users.values()} == set(PARTS)
    for user in users.values():
        rights = user["AccessString"]["Fn::Sub"].replace("${Namespace}", "NAME").split()
        assert rights == acl_rules(REDIS_ROLES[user["UserName"]], "NAME"), user["UserName"]


def test_there_is_no_door_but_the_api() -> None:
    """Nothing listens to the world: no addresses, no function URLs, no open groups, no buckets."""
    kinds = {resource["Type"] for resource in transformed()["Resources"].values()}
    assert not kinds & {
        "AWS::Lambda::Url",
        "AWS::ElasticLoadBalancingV2::LoadBalancer",
        "AWS::EC2::InternetGateway",
        "AWS::EC2::EIP",
    }
    for group in of_type("AWS::EC2::SecurityGroup").values():
        for rule in group.get("SecurityGroupIngress", []):
            assert "SourceSecurityGroupId" in rule
            assert not {"CidrIp", "CidrIpv6"} & set(rule)
    assert not of_type("AWS::EC2::SecurityGroupIngress")
    for service in of_type("AWS::ECS::Service").values():
        network = service["NetworkConfiguration"]["AwsvpcConfiguration"]
        assert network["AssignPublicIp"] == "DISABLED"
    buckets = of_type("AWS::S3::Bucket")
    assert len(buckets) == 2
    for bucket in buckets.values():
        assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
        assert bucket["LifecycleConfiguration"]["Rules"]
    for permission in of_type("AWS::Lambda::Permission").values():
        assert permission["Principal"] == "apigateway.amazonaws.com"
        assert "SourceArn" in permission


def test_roles_may_do_what_they_must_and_no_more() -> None:
    """No wildcard in an action that is allowed; `*` as a resource only where AWS knows no other."""
    wide = set()
    for name, statement in statements():
        if statement["Effect"] == "Deny" or "AssumeRole" in str(statement["Action"]):
            continue
        for action in as_list(statement["Action"]):
            assert "*" not in action, f"{name}: {action}"
        if "*" in as_list(statement.get("Resource", [])) and "Condition" not in statement:
            wide |= set(as_list(statement["Action"]))
    assert wide == {
        "ec2:AssignPrivateIpAddresses",
        "ec2:CreateNetworkInterface",
        "ec2:DeleteNetworkInterface",
        "ec2:DescribeNetworkInterfaces",
        "ec2:DescribeSubnets",
        "ec2:UnassignPrivateIpAddresses",
        "ecr:GetAuthorizationToken",
    }


def test_each_part_reads_its_own_secrets() -> None:
    """And has a role of its own."""
    read = {
        name: {arn["Ref"] for arn in as_list(statement["Resource"])}
        for name, statement in statements()
        if statement["Action"] == "secretsmanager:GetSecretValue"
    }
    assert read == {
        "ApiRole": {"ApiKeySecret", "KeyPepperSecret", "GatewayCacheSecret"},
        "StreamRole": {"ApiKeySecret", "KeyPepperSecret", "GatewayCacheSecret"},
        "HousekeeperRole": {"HousekeeperCacheSecret"},
        "WorkerExecutionRole": {"WorkerCacheSecret"},
        "CallbacksExecutionRole": {"CallbacksCacheSecret", "CallbackKeySecret"},
        "PoolExecutionRole": {"PoolCacheSecret"},
    }


def test_a_worker_has_a_gpu_and_time_to_hand_over() -> None:
    """On Managed Instances or on an Auto Scaling group, with the notice of a spot machine."""
    task = of_type("AWS::ECS::TaskDefinition")["WorkerTask"]
    [container] = task["ContainerDefinitions"]
    command = container["Command"]
    assert container["ResourceRequirements"] == [{"Type": "GPU", "Value": "1"}]
    assert int(command[command.index("--drain-s") + 1]) < container["StopTimeout"] == 120
    assert task["RequiresCompatibilities"][0]["Fn::If"] == ["IsManaged", "MANAGED_INSTANCES", "EC2"]
    service = of_type("AWS::ECS::Service")["WorkerService"]
    assert "DesiredCount" not in service  # the pool's, not the stack's
    capacity = of_type("AWS::ECS::CapacityProvider")
    managed = capacity["ManagedCapacity"]["ManagedInstancesProvider"]["InstanceLaunchTemplate"]
    assert managed["InstanceRequirements"]["AcceleratorNames"] == [{"Ref": "GpuName"}]
    group = capacity["GroupCapacity"]["AutoScalingGroupProvider"]
    assert group["ManagedTerminationProtection"] == "ENABLED"
    assert of_type("AWS::AutoScaling::AutoScalingGroup")["GpuGroup"]["MinSize"] == "0"
    launch = of_type("AWS::EC2::LaunchTemplate")["GpuLaunchTemplate"]["LaunchTemplateData"]
    assert launch["MetadataOptions"]["HttpTokens"] == "required"


def container(task: str) -> dict[str, Any]:
    [found] = of_type("AWS::ECS::TaskDefinition")[task]["ContainerDefinitions"]
    return dict(found)


def arguments(task: str) -> list[str]:
    """Of a task's command; what stands for a parameter is that parameter's default."""
    defaults = {name: str(p.get("Default")) for name, p in written()["Parameters"].items()}
    command = container(task)["Command"]
    return [
        part if isinstance(part, str) else defaults.get(part.get("Ref"), "x") for part in command
    ]


def test_every_service_runs_a_command_that_exists() -> None:
    """With options that it knows, and values that it takes."""
    batchway = build_parser()
    assert batchway.parse_args(arguments("CallbacksTask")).command == "callbacks"
    # The image's entry point puts `worker` before them.
    assert batchway.parse_args(["worker", *arguments("WorkerTask")]).command == "worker"
    assert container("PoolTask")["EntryPoint"] == ["python", "-m", pool_service.__name__]
    pool = pool_service.policy_of(pool_service.build_parser().parse_args(arguments("PoolTask")))
    assert pool.max_workers == int(written()["Parameters"]["MaxWorkers"]["Default"])
    with pytest.raises(SystemExit):
        batchway.parse_args(["callback"])


def test_callbacks_are_delivered_and_signed() -> None:
    """By default; with all that `batchway callbacks` cannot do without."""
    assert written()["Parameters"]["WithCallbacks"]["Default"] == "yes"
    given = container("CallbacksTask")
    variables = {pair["Name"]: pair["Value"] for pair in given["Environment"]}
    secrets = {pair["Name"]: pair["ValueFrom"]["Fn::Sub"] for pair in given["Secrets"]}
    assert set(secrets) == {"REDIS_PASSWORD", KEY_VARIABLE}
    made = of_type("AWS::SecretsManager::Secret")["CallbackKeySecret"]["GenerateSecretString"]
    assert made["GenerateStringKey"] == KEY_VARIABLE
    assert secrets[KEY_VARIABLE] == f"${{CallbackKeySecret}}:{KEY_VARIABLE}::"
    assert made["PasswordLength"] >= MIN_KEY_CHARS
    # Whoever accepts a target and whoever goes there are told the same.
    for function in ("ApiFunction", "StreamFunction"):
        theirs = of_type("AWS::Lambda::Function")[function]["Environment"]["Variables"]
        for name in (AWS_VARIABLE, variable("object_store")):
            assert theirs[name] == variables[name]


def test_callbacks_may_reach_what_the_operator_names_and_no_more() -> None:
    """One right for each kind of target, on the resources of a parameter that is empty at first."""
    documents = of_type("AWS::IAM::Role")["CallbacksTaskRole"]["Policies"]
    [results, *into_aws] = documents[0]["PolicyDocument"]["Statement"]
    assert results["Action"] == "s3:GetObject"
    found = {}
    for condition, statement, otherwise in (given["Fn::If"] for given in into_aws):
        assert otherwise == {"Ref": "AWS::NoValue"}
        parameter = statement["Resource"]["Ref"]
        told = written()["Parameters"][parameter]
        assert told["Default"] == ""
        assert parameter in json.dumps(written()["Conditions"][condition])
        assert not re.fullmatch(told["AllowedPattern"], "*")
        found[statement["Action"]] = parameter
    assert found == {
        "sqs:SendMessage": "CallbackQueueArns",
        "sns:Publish": "CallbackTopicArns",
        "events:PutEvents": "CallbackBusArns",
        "lambda:InvokeFunction": "CallbackFunctionArns",
        "s3:PutObject": "CallbackObjectArns",
    }


@pytest.mark.parametrize(
    ("parameter", "arn"),
    [
        ("CallbackQueueArns", "arn:aws:sqs:eu-central-1:123456789012:jobs-*"),
        ("CallbackTopicArns", "arn:aws:sns:eu-central-1:123456789012:jobs.fifo"),
        ("CallbackBusArns", "arn:aws:events:us-east-1:123456789012:event-bus/default"),
        ("CallbackFunctionArns", "arn:aws-us-gov:lambda:us-east-1:123456789012:function:done:live"),
        ("CallbackObjectArns", "arn:aws:s3:::my-bucket/jobs/*"),
    ],
)
def test_targets_of_callbacks_are_given_as_arns(parameter: str, arn: str) -> None:
    """Of their own service and account; a bare wildcard or another service's is refused."""
    pattern = written()["Parameters"][parameter]["AllowedPattern"]
    assert re.fullmatch(pattern, "")
    assert re.fullmatch(pattern, arn)
    for wrong in ("*", "arn:aws:*", "arn:aws:s3:::*", "arn:aws:iam::123456789012:role/x"):
        assert not re.fullmatch(pattern, wrong)


def test_who_waits_is_told_of_the_cold_start() -> None:
    """The gateways count with the same figure as the pool."""
    cold_start = {"Ref": "ColdStartS"}
    for function in ("ApiFunction", "StreamFunction"):
        theirs = of_type("AWS::Lambda::Function")[function]["Environment"]["Variables"]
        assert theirs[variable("cold_start_s")] == cold_start
    command = container("PoolTask")["Command"]
    assert command[command.index("--cold-start-s") + 1] == cold_start


def test_messages_come_back_one_by_one() -> None:
    """The intake reports which of a batch failed, and waits long enough before it sends again."""
    [mapping] = of_type("AWS::Lambda::EventSourceMapping").values()
    queue = of_type("AWS::SQS::Queue")["IntakeQueue"]
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    timeout_s = of_type("AWS::Lambda::Function")["ApiFunction"]["Timeout"]
    assert queue["VisibilityTimeout"] >= 6 * timeout_s
    assert queue["RedrivePolicy"]["maxReceiveCount"] > 1
    assert queue["SqsManagedSseEnabled"]


def test_every_parameter_says_what_it_is() -> None:
    """With a default, unless it belongs to one account; and all stand in a group of the form."""
    parameters = written()["Parameters"]
    assert all(parameter.get("Description") for parameter in parameters.values())
    without = {name for name, parameter in parameters.items() if "Default" not in parameter}
    assert without == {"VpcId", "PrivateSubnetIds", "WorkerImageUri", "ServicesImageUri"}
    form = written()["Metadata"]["AWS::CloudFormation::Interface"]["ParameterGroups"]
    assert sorted(name for group in form for name in group["Parameters"]) == sorted(parameters)


def test_the_dashboard_is_json() -> None:
    """CloudWatch takes it as a text, and no linter reads that. What it shows of lanes is told."""
    [board] = of_type("AWS::CloudWatch::Dashboard").values()
    body = re.sub(r"\$\{[^}]+\}", "x", board["DashboardBody"]["Fn::Sub"])
    assert len(json.loads(body)["widgets"]) == 8
    shown = set(re.findall(r'MetricName=\\"(\w+)', body))
    assert len(shown) == 4
    assert shown <= set(fleet_lines.UNITS)
