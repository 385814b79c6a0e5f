"""The GPU pool of template.yaml: workers on Managed Instances, and the service that sizes it."""

import re

import pytest

from gateway.settings import variable
from infra.aws import container_entry, pool_service
from infra.parser import build_parser
from infra.pool import PoolPolicy
from tests.aws.template import (
    arguments,
    container,
    of_type,
    written,
)


def test_a_worker_has_a_gpu_and_time_to_drain() -> None:
    """On Managed Instances. The drain fits a spot machine's notice."""
    task = of_type("AWS::ECS::TaskDefinition")["WorkerTask"]
    [container] = task["ContainerDefinitions"]
    command = arguments("WorkerTask")
    gpus = {"Ref": "WorkerGpus"}
    assert container["ResourceRequirements"] == [{"Type": "GPU", "Value": gpus}]
    assert int(command[command.index("--drain-s") + 1]) < container["StopTimeout"] == 120
    assert task["RequiresCompatibilities"] == ["MANAGED_INSTANCES"]
    service = of_type("AWS::ECS::Service")["WorkerService"]
    assert service["DesiredCount"] == {"Fn::GetAtt": ["WorkerCount", "DesiredCount"]}
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
    for function in ("ApiFunction", "StreamFunction"):
        theirs = of_type("AWS::Lambda::Function")[function]["Environment"]["Variables"]
        assert theirs[variable("cold_start_s")] == cold_start
    assert {"Fn::Sub": "--cold-start-s=${ColdStartS}"} in container("PoolTask")["Command"]
    theirs = {pair["Name"]: pair["Value"] for pair in container("FlowsTask")["Environment"]}
    assert theirs[variable("cold_start_s")] == cold_start


def test_gateways_know_the_model_before_any_worker() -> None:
    """The pool starts the first one for a call, which else would be of an unknown model."""
    served = {"Ref": "ServedModelName"}
    for function in ("ApiFunction", "StreamFunction", "StreamInstancesFunction"):
        theirs = of_type("AWS::Lambda::Function")[function]["Environment"]["Variables"]
        assert theirs[variable("declared_models")] == served
    theirs = {pair["Name"]: pair["Value"] for pair in container("FlowsTask")["Environment"]}
    assert theirs[variable("declared_models")] == served
    assert {"Fn::Sub": "--model-name=${ServedModelName}"} in container("PoolTask")["Command"]


def test_the_pool_sizes_the_service_of_its_workers() -> None:
    given = pool_service.build_parser().parse_args(arguments("PoolTask"))
    assert (given.ecs_cluster, given.ecs_service) == ("x", "x-worker")
    assert of_type("AWS::ECS::Service")["WorkerService"]["ServiceName"] == {
        "Fn::Sub": "${AWS::StackName}-worker"
    }
