"""Who may do what in template.yaml: roles, secrets, users of the cache, doors."""

import json
import re

from infra.redis_roles import REDIS_ROLES, acl_rules
from tests.aws.template import (
    as_list,
    of_type,
    statements,
    transformed,
)

PARTS = ("gateway", "worker", "callbacks", "pool", "housekeeper")


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


def test_nothing_is_public() -> None:
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
        "autoscaling:DescribeAutoScalingGroups",
        "autoscaling:DescribeScalingActivities",
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
        "MachineRole": {"WorkerCacheSecret"},
        "CallbacksExecutionRole": {"CallbacksCacheSecret", "CallbackKeySecret"},
        "PoolExecutionRole": {"PoolCacheSecret"},
    }
