"""Permissions in template.yaml: roles, secrets, users of the cache, network."""

import json
import re

import pytest

from infra.aws.acl import TEMPLATE, with_rights
from infra.redis_roles import REDIS_ROLES, acl_rules
from tests.aws.template import (
    as_list,
    chosen,
    data,
    functions,
    of_type,
    statements,
    transformed,
    variables,
)

PARTS = ("gateway", "worker", "flows", "callbacks", "pool", "housekeeper", "operator")


def test_no_secret_is_in_plain_text() -> None:
    """Secrets Manager generates the secrets, and tasks and functions get their names."""
    made = of_type("AWS::SecretsManager::Secret")
    assert all("SecretString" not in secret for secret in made.values())
    assert all(secret["GenerateSecretString"]["PasswordLength"] >= 43 for secret in made.values())
    for part in (*functions(), *of_type("AWS::ECS::TaskDefinition")):
        for name, value in variables(part).items():
            assert "resolve:" not in json.dumps(value), name
            assert not re.search(r"PASSWORD|API_KEY|TOKEN", name)
    for user in of_type("AWS::ElastiCache::User").values():
        assert json.dumps(user["Passwords"]).count("{{resolve:secretsmanager:") == 1


def test_the_cache_evicts_nothing_and_authenticates_every_part() -> None:
    """It requires TLS, has one user for each part, and survives the loss of a zone."""
    [parameters] = of_type("AWS::ElastiCache::ParameterGroup").values()
    [cache] = of_type("AWS::ElastiCache::ReplicationGroup").values()
    users = of_type("AWS::ElastiCache::User")
    assert parameters["Properties"]["maxmemory-policy"] == "noeviction"
    assert cache["CacheParameterGroupName"] == {"Ref": "CacheParameters"}
    assert cache["Engine"] == "valkey"
    assert cache["TransitEncryptionMode"] == "required"
    assert cache["AtRestEncryptionEnabled"]
    assert cache["MultiAZEnabled"]
    assert {user["UserName"] for user in users.values()} == set(PARTS)
    for user in users.values():
        rights = user["AccessString"].split()
        rules = acl_rules(REDIS_ROLES[user["UserName"]], "default")
        assert sorted(rights) == sorted(rules), user["UserName"]
        assert not any(rule.startswith("+") for rule in rights[: rights.index("-@all")])
    text = TEMPLATE.read_text()
    assert with_rights(text) == text, "the rights of users are written by: python -m infra.aws.acl"


@pytest.mark.parametrize("is_durable", [False, True])
def test_the_cache_is_a_cluster_where_it_is_durable(is_durable: bool) -> None:
    """ElastiCache offers durability to clusters only; every part is told to find the primary."""
    template = chosen(transformed(), *["IsDurable"] * is_durable)
    properties = template["Resources"]["Cache"]["Properties"]
    settings = template["Resources"]["CacheParameters"]["Properties"]["Properties"]
    assert properties["ClusterMode"] == ("enabled" if is_durable else "disabled")
    assert properties.get("Durability") == ("sync" if is_durable else None)
    assert properties.get("NumNodeGroups") == (1 if is_durable else None)
    assert ("NumCacheClusters" in properties) != is_durable
    assert settings.get("cluster-enabled") == ("yes" if is_durable else None)
    address = chosen(data()["Outputs"]["CacheAddress"]["Value"], *["IsDurable"] * is_durable)
    assert address["Fn::Sub"].endswith("?cluster=true") == is_durable
    assert ("ConfigurationEndPoint" in address["Fn::Sub"]) == is_durable
    urls = re.findall(r"rediss://[^\"]+", json.dumps(template))
    assert len(urls) == 9
    assert all(url.endswith("@${CacheAddress}") for url in urls)


def test_nothing_is_public() -> None:
    """No public addresses, open security groups or public buckets; a function URL is IAM's."""
    kinds = {resource["Type"] for resource in transformed()["Resources"].values()}
    assert {url["AuthType"] for url in of_type("AWS::Lambda::Url").values()} == {"AWS_IAM"}
    assert not kinds & {
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


def test_roles_have_no_wildcards() -> None:
    """No allowed action has a wildcard. The resource `*` is used only where AWS requires it."""
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
    read = {
        name: {arn["Ref"] for arn in as_list(statement["Resource"])}
        for name, statement in statements()
        if statement["Action"] == "secretsmanager:GetSecretValue"
    }
    assert read == {
        "ApiRole": {"ApiKeySecret", "KeyPepperSecret", "GatewayCacheSecret"},
        "StreamRole": {"ApiKeySecret", "KeyPepperSecret", "GatewayCacheSecret"},
        "HousekeeperRole": {"HousekeeperCacheSecret"},
        "OperatorRole": {"KeyPepperSecret", "OperatorCacheSecret"},
        "WorkerExecutionRole": {"WorkerCacheSecret"},
        "CallbacksExecutionRole": {"CallbacksCacheSecret", "CallbackKeySecret"},
        "PoolExecutionRole": {"PoolCacheSecret"},
        "FlowsExecutionRole": {"FlowsCacheSecret"},
    }


def test_an_own_key_is_used_for_all_that_is_kept_and_by_all_who_read_it() -> None:
    """None is asked for where the parameter is empty."""
    key = {"Ref": "KmsKeyArn"}
    with_key, without = chosen(transformed(), "HasKey"), chosen(transformed())
    made = [one for one in without["Resources"].values() if "::Stack" not in one["Type"]]
    assert "KmsKeyArn" not in json.dumps(made)
    for resource in with_key["Resources"].values():
        given = resource.get("Properties", {})
        match resource["Type"]:
            case "AWS::SecretsManager::Secret":
                assert given["KmsKeyId"] == key
            case "AWS::ElastiCache::ReplicationGroup":
                assert given["KmsKeyId"] == key
            case "AWS::S3::Bucket":
                assert (
                    key
                    in given["BucketEncryption"]["ServerSideEncryptionConfiguration"][0][
                        "ServerSideEncryptionByDefault"
                    ].values()
                )
    allowed = {name for name, one in statements() if "kms:Decrypt" in as_list(one["Action"])}
    for name, one in statements():
        actions = {"s3:GetObject", "secretsmanager:GetSecretValue"} & {*as_list(one["Action"])}
        attached = with_key["Resources"][name]["Properties"].get("ManagedPolicyArns", [])
        if actions:
            assert {name, *(arn.get("Ref") for arn in attached)} & allowed, name
