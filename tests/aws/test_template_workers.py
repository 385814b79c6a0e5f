"""The GPU pool of template.yaml: ECS tasks, or machines that the operator runs."""

import pytest

from gateway.settings import variable
from infra.aws import container_entry, pool_service
from infra.parser import build_parser
from infra.pool import PoolPolicy
from tests.aws.template import (
    arguments,
    as_list,
    container,
    of_type,
    statements,
    transformed,
    written,
)


def test_a_worker_has_a_gpu_and_time_to_drain() -> None:
    """On Managed Instances or an Auto Scaling group. The drain fits a spot machine's notice."""
    task = of_type("AWS::ECS::TaskDefinition")["WorkerTask"]
    [container] = task["ContainerDefinitions"]
    command = container["Command"]
    assert container["ResourceRequirements"] == [{"Type": "GPU", "Value": "1"}]
    assert int(command[command.index("--drain-s") + 1]) < container["StopTimeout"] == 120
    assert task["RequiresCompatibilities"][0]["Fn::If"] == ["IsManaged", "MANAGED_INSTANCES", "EC2"]
    service = of_type("AWS::ECS::Service")["WorkerService"]
    assert "DesiredCount" not in service  # the pool sets it, not the stack
    capacity = of_type("AWS::ECS::CapacityProvider")
    managed = capacity["ManagedCapacity"]["ManagedInstancesProvider"]["InstanceLaunchTemplate"]
    assert managed["InstanceRequirements"]["AcceleratorNames"] == [{"Ref": "GpuName"}]
    group = capacity["GroupCapacity"]["AutoScalingGroupProvider"]
    assert group["ManagedTerminationProtection"] == "ENABLED"
    assert of_type("AWS::AutoScaling::AutoScalingGroup")["GpuGroup"]["MinSize"] == "0"
    launch = of_type("AWS::EC2::LaunchTemplate")["GpuLaunchTemplate"]["LaunchTemplateData"]
    assert launch["MetadataOptions"]["HttpTokens"] == "required"


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


def test_gateways_and_pool_have_the_same_cold_start() -> None:
    """ETAs include it."""
    cold_start = {"Ref": "ColdStartS"}
    for function in ("ApiFunction", "StreamFunction"):
        theirs = of_type("AWS::Lambda::Function")[function]["Environment"]["Variables"]
        assert theirs[variable("cold_start_s")] == cold_start
    assert {"Fn::Sub": "--cold-start-s=${ColdStartS}"} in container("PoolTask")["Command"]
    theirs = {pair["Name"]: pair["Value"] for pair in container("FlowsTask")["Environment"]}
    assert theirs[variable("cold_start_s")] == cold_start


def test_gateways_know_the_model_of_the_pool() -> None:
    """Before any worker has announced it: a call of it is the pool's demand."""
    model = {"Ref": "ServedModelName"}
    for function in ("ApiFunction", "StreamFunction"):
        theirs = of_type("AWS::Lambda::Function")[function]["Environment"]["Variables"]
        assert theirs[variable("declared_models")] == model
    flows = {pair["Name"]: pair["Value"] for pair in container("FlowsTask")["Environment"]}
    assert flows[variable("declared_models")] == model
    assert {"Fn::Sub": "--model-name=${ServedModelName}"} in container("PoolTask")["Command"]


def test_the_pool_is_given_a_service_or_a_group() -> None:
    """An ECS service, or the group of the operator's machines. The policy is the same."""
    parser = pool_service.build_parser()
    on_ecs = parser.parse_args(arguments("PoolTask"))
    on_machines = parser.parse_args([*arguments("PoolTask", has_machines=True)])
    assert (on_ecs.ecs_cluster, on_ecs.ecs_service) == ("x", "x-worker")
    assert on_ecs.auto_scaling_group is None
    assert on_machines.ecs_service is None
    assert on_machines.auto_scaling_group == written()["Parameters"]["MachineGroupName"]["Default"]
    assert pool_service.policy_of(on_ecs) == pool_service.policy_of(on_machines)


def test_machines_of_the_operator_need_no_ecs() -> None:
    """No task, service or instances. The machines may read their weights and report themselves
    unhealthy."""
    conditions = {name: r.get("Condition") for name, r in transformed()["Resources"].items()}
    tasks = {name for name, condition in conditions.items() if condition == "HasTasks"}
    assert tasks == {
        "WorkerLog", "WorkerExecutionRole", "WorkerTaskRole", "WorkerTask", "WorkerService",
        "InstanceRole", "InstanceProfile",
    }  # fmt: skip
    allowed = {
        (name, action): statement["Resource"]
        for name, statement in statements()
        for action in as_list(statement["Action"])
        if action.startswith("autoscaling:Set")
    }
    assert set(allowed) == {
        ("PoolTaskRole", "autoscaling:SetDesiredCapacity"),
        ("PoolTaskRole", "autoscaling:SetInstanceProtection"),
        ("MachineRole", "autoscaling:SetInstanceHealth"),
    }
    for resource in allowed.values():
        assert resource["Fn::Sub"].endswith(":autoScalingGroupName/${MachineGroupName}")
    rule = transformed()["Rules"]["MachinesHaveAGroup"]
    assert rule["Assertions"][0]["Assert"] == {
        "Fn::Not": [{"Fn::Equals": [{"Ref": "MachineGroupName"}, ""]}]
    }
