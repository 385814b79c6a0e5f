"""Services of template.yaml: workers on Managed Instances, what sizes their pool, and callbacks,
which are delivered, signed, and limited to the operator's targets."""

import json
import re

import pytest

from gateway.settings import variable
from infra.aws import container_entry, pool_service
from infra.callbacks_command import AWS_VARIABLE, KEY_VARIABLE
from infra.parser import build_parser
from infra.pool import PoolPolicy
from tests.aws.template import (
    arguments,
    container,
    of_type,
    transformed,
    variables,
    written,
)
from workers.callbacks.deliverer import MIN_KEY_CHARS


def test_a_worker_has_a_gpu_and_time_to_drain() -> None:
    """On Managed Instances. The drain fits a spot machine's notice."""
    task = of_type("AWS::ECS::TaskDefinition")["WorkerTask"]
    [container] = task["ContainerDefinitions"]
    command = arguments("WorkerTask")
    gpus = {"Ref": "WorkerGpus"}
    assert container["ResourceRequirements"] == [{"Type": "GPU", "Value": gpus}]
    assert int(command[command.index("--drain-s") + 1]) < container["StopTimeout"] == 120
    assert task["RequiresCompatibilities"] == ["MANAGED_INSTANCES"]
    capacity = of_type("AWS::ECS::CapacityProvider")
    managed = capacity["ManagedCapacity"]["ManagedInstancesProvider"]["InstanceLaunchTemplate"]
    assert managed["InstanceRequirements"]["AcceleratorNames"] == [{"Ref": "GpuName"}]
    assert managed["InstanceRequirements"]["AcceleratorCount"] == {"Min": gpus, "Max": gpus}


def test_every_service_runs_a_command_that_exists() -> None:
    """With options and values that the command accepts."""
    batchway = build_parser()
    assert batchway.parse_args(arguments("CallbacksTask")).command == "callbacks"
    gateway = batchway.parse_args(["gateway", *arguments("FlowsTask")])
    assert (gateway.host, gateway.port) == ("127.0.0.1", 8000)  # where its health is asked
    assert gateway.drain_s < container("FlowsTask")["StopTimeout"]
    entry = ["python", "-m", container_entry.__name__, "gateway"]
    assert container("FlowsTask")["EntryPoint"] == entry
    # The image's entry point puts `worker` before them.
    assert batchway.parse_args(["worker", *arguments("WorkerTask")]).command == "worker"
    engines = written()["Parameters"]["WorkerEngine"]
    for engine in engines["AllowedValues"]:
        changed = [
            engine if part == engines["Default"] else part for part in arguments("WorkerTask")
        ]
        assert batchway.parse_args(["worker", *changed]).engine == engine
    assert container("PoolTask")["EntryPoint"] == ["python", "-m", pool_service.__name__]
    pool = pool_service.policy_of(pool_service.build_parser().parse_args(arguments("PoolTask")))
    assert pool == PoolPolicy(wait_targets_s=pool.wait_targets_s)  # the replay's defaults
    with pytest.raises(SystemExit):
        batchway.parse_args(["callback"])


def test_workers_take_any_option_of_their_command() -> None:
    """From a parameter, which gives no empty word where it is empty; a wrong form is refused."""
    options = "--dtype bfloat16 --engine-arg tensor_parallel_size=2 --max-num-seqs 64"
    given = arguments("WorkerTask", worker_options=options)
    worker = build_parser().parse_args(["worker", *given])
    assert (worker.dtype, worker.max_num_seqs) == ("bfloat16", 64)
    assert worker.engine_arg == [("tensor_parallel_size", "2")]
    assert "" not in arguments("WorkerTask")
    pattern = written()["Parameters"]["WorkerOptions"]["AllowedPattern"]
    assert re.fullmatch(pattern, options)
    assert re.fullmatch(pattern, "")
    for wrong in (" --dtype float16", "--dtype  float16", "--dtype float16 "):
        assert not re.fullmatch(pattern, wrong)


def test_gateways_and_pool_have_the_same_cold_start() -> None:
    """ETAs include it."""
    cold_start = {"Ref": "ColdStartS"}
    for part in ("ApiFunction", "StreamFunction", "FlowsTask"):
        assert variables(part)[variable("cold_start_s")] == cold_start
    assert {"Fn::Sub": "--cold-start-s=${ColdStartS}"} in container("PoolTask")["Command"]


def test_gateways_know_the_model_before_any_worker() -> None:
    """The pool starts the first one for a call, which else would be of an unknown model."""
    for part in ("Services", "Front"):
        given = written()["Resources"][part]["Properties"]["Parameters"]
        assert given["Models"] == {"Ref": "ServedModelName"}
    for part in ("ApiFunction", "StreamFunction", "StreamInstancesFunction", "FlowsTask"):
        assert variables(part)[variable("declared_models")] == {"Ref": "Models"}
    assert {"Fn::Sub": "--model-name=${ServedModelName}"} in container("PoolTask")["Command"]


def test_the_pool_sizes_the_service_of_its_workers() -> None:
    given = pool_service.build_parser().parse_args(arguments("PoolTask"))
    assert (given.ecs_cluster, given.ecs_service) == ("x", "x-worker")
    assert of_type("AWS::ECS::Service")["WorkerService"]["ServiceName"] == {
        "Fn::Sub": "${AWS::StackName}-worker"
    }


def test_callbacks_are_delivered_and_signed() -> None:
    """By default, with everything that `batchway callbacks` needs."""
    assert written()["Parameters"]["WithCallbacks"]["Default"] == "yes"
    given = container("CallbacksTask")["Secrets"]
    secrets = {pair["Name"]: pair["ValueFrom"]["Fn::Sub"] for pair in given}
    assert set(secrets) == {"REDIS_PASSWORD", KEY_VARIABLE}
    made = of_type("AWS::SecretsManager::Secret")["CallbackKeySecret"]["GenerateSecretString"]
    assert made["GenerateStringKey"] == KEY_VARIABLE
    assert secrets[KEY_VARIABLE] == f"${{CallbackKeySecret}}:{KEY_VARIABLE}::"
    assert made["PasswordLength"] >= MIN_KEY_CHARS
    # Functions accept the targets that the callbacks task may reach.
    for function in ("ApiFunction", "StreamFunction"):
        for name in (AWS_VARIABLE, variable("object_store")):
            assert variables(function)[name] == variables("CallbacksTask")[name]


def test_callbacks_may_reach_only_the_operators_targets() -> None:
    """One permission for each kind of target, on the ARNs of a parameter; its default is empty."""
    documents = of_type("AWS::IAM::Role")["CallbacksTaskRole"]["Policies"]
    [key, results, listed, *into_aws] = documents[0]["PolicyDocument"]["Statement"]
    assert key["Fn::If"][0] == "HasKey"
    assert (results["Action"], listed["Action"]) == ("s3:GetObject", "s3:ListBucket")
    found = {}
    for condition, statement, otherwise in (given["Fn::If"] for given in into_aws):
        assert otherwise == {"Ref": "AWS::NoValue"}
        parameter = statement["Resource"]["Ref"]
        definition = written()["Parameters"][parameter]
        assert definition["Default"] == ""
        assert parameter in json.dumps(transformed()["Conditions"][condition])
        assert not re.fullmatch(definition["AllowedPattern"], "*")
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
    """Of the right service and account. A lone wildcard and another service's ARN are rejected."""
    pattern = written()["Parameters"][parameter]["AllowedPattern"]
    assert re.fullmatch(pattern, "")
    assert re.fullmatch(pattern, arn)
    for wrong in ("*", "arn:aws:*", "arn:aws:s3:::*", "arn:aws:iam::123456789012:role/x"):
        assert not re.fullmatch(pattern, wrong)
