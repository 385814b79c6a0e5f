"""The API of template.yaml: which path goes to which function, how, and with which settings."""

import re
from typing import Any

import pytest

from gateway.aws.environment import SECRETS_VARIABLE, SETTINGS_VARIABLE
from gateway.aws.intake import DEAD_LETTERS_VARIABLE
from gateway.settings import GatewaySettings, variable
from tests.aws.template import (
    ROOT,
    chosen,
    functions,
    of_type,
    transformed,
    variables,
)

STREAM_INSTANCES = "StreamInstancesFunction"
ANY = "x-amazon-apigateway-any-method"


def paths() -> dict[str, Any]:
    [api] = of_type("AWS::ApiGateway::RestApi").values()
    found: dict[str, Any] = api["Body"]["paths"]
    return found


def integration(path: str, method: str) -> dict[str, Any]:
    found: dict[str, Any] = paths()[path][method]["x-amazon-apigateway-integration"]
    return found


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions", ANY),
        ("/v1/completions", ANY),
        ("/v1/embeddings", ANY),
        ("/v1/messages", ANY),
        ("/v1/responses", ANY),
        ("/v1/responses/{response}", "get"),
        ("/v1/jobs/{job}/events", ANY),
        ("/v1/uploads/{upload}/complete", ANY),
    ],
)
def test_streaming_routes_use_the_streaming_function(path: str, method: str) -> None:
    """By Lambda's streaming invocation, for up to a function's longest run time."""
    found = integration(path, method)
    uri, arguments = found["uri"]["Fn::Sub"]
    assert uri.endswith(
        ":lambda:path/2021-11-15/functions/${Function}/response-streaming-invocations"
    )
    assert found["responseTransferMode"] == "STREAM"
    assert found["timeoutInMillis"] == 900_000
    for condition, name in (("", "StreamFunction"), ("HasStreamInstances", STREAM_INSTANCES)):
        assert chosen(arguments["Function"], condition) == {"Ref": f"{name}Aliaslive"}


def test_every_path_takes_a_preflight() -> None:
    """API Gateway would refuse OPTIONS by itself where a path lists other methods alone."""
    assert [path for path, item in paths().items() if ANY not in item] == []


def test_other_routes_use_the_buffered_function() -> None:
    """Within API Gateway's timeout."""
    found = integration("/{proxy+}", ANY)
    uri, arguments = found["uri"]["Fn::Sub"]
    assert uri.endswith(":lambda:path/2015-03-31/functions/${Function}/invocations")
    assert arguments["Function"] == {"Ref": "ApiFunctionAliaslive"}
    assert len(paths()) == 9
    timeout_s = of_type("AWS::Lambda::Function")["ApiFunction"]["Timeout"]
    assert timeout_s * 1000 <= found["timeoutInMillis"]


def test_functions_are_arm_and_one_starts_from_a_snapshot() -> None:
    """SnapStart needs published versions, which the API calls by their alias."""
    made = functions()
    assert set(made) == {
        "ApiFunction", "StreamFunction", STREAM_INSTANCES, "HousekeeperFunction",
        "OperatorFunction",
    }  # fmt: skip
    for name, function in made.items():
        assert function["Architectures"] == ["arm64"]
        assert function["Runtime"] == "python3.13"  # SnapStart needs 3.12 or later
        place = of_type("AWS::Lambda::CapacityProvider")["StreamInstances"]
        vpc = (place if name == STREAM_INSTANCES else function)["VpcConfig"]
        assert vpc["SubnetIds"] == {"Ref": "PrivateSubnetIds"}
    assert made["ApiFunction"]["SnapStart"] == {"ApplyOn": "PublishedVersions"}
    assert "SnapStart" not in made["StreamFunction"]
    assert len(of_type("AWS::Lambda::Version")) == len(of_type("AWS::Lambda::Alias")) == 5


def test_the_two_stream_functions_differ_in_where_they_run() -> None:
    """One has an environment for each stream, the other shares machines."""
    one, other = (dict(functions()[name]) for name in ("StreamFunction", STREAM_INSTANCES))
    differ = {name for name in one | other if one.get(name) != other.get(name)}
    assert differ == {
        "MemorySize", "ReservedConcurrentExecutions", "VpcConfig", "CapacityProviderConfig",
        "FunctionScalingConfig",
    }  # fmt: skip
    conditions = {name: r.get("Condition") for name, r in transformed()["Resources"].items()}
    assert conditions["StreamFunction"] == "HasStreamEnvironments"
    assert conditions[STREAM_INSTANCES] == "HasStreamInstances"
    capacity = other["CapacityProviderConfig"]["LambdaManagedInstancesCapacityProviderConfig"]
    most = capacity["PerExecutionEnvironmentMaxConcurrency"]
    per_address = GatewaySettings.model_fields["max_connections_per_address"].default
    assert 1 < most < per_address  # the adapter's calls come from one address


@pytest.mark.parametrize("name", ["StreamFunction", "StreamInstancesFunction"])
def test_streams_go_through_the_web_adapter(name: str) -> None:
    """The layer starts the handler, which runs an existing module."""
    function, given = of_type("AWS::Lambda::Function")[name], variables(name)
    assert given["AWS_LWA_INVOKE_MODE"] == "response_stream"
    assert given["AWS_LAMBDA_EXEC_WRAPPER"] == "/opt/bootstrap"
    [layer] = function["Layers"]
    assert "LambdaAdapterLayerArm64" in layer["Fn::Sub"]
    path = ROOT / "gateway" / "aws" / function["Handler"]
    assert path.stat().st_mode & 0o111
    module = re.search(r"-m (gateway\.aws\.\w+)", path.read_text())
    assert module is not None
    assert (ROOT / f"{module[1].replace('.', '/')}.py").exists()


def test_every_variable_of_a_function_is_a_setting() -> None:
    known = {variable(name) for name in GatewaySettings.model_fields}
    known |= {SECRETS_VARIABLE, DEAD_LETTERS_VARIABLE, SETTINGS_VARIABLE}
    for name in functions():
        given = set(variables(name))
        assert {v for v in given if v.startswith("BATCHWAY_")} <= known, name
        assert {"REDIS_URL", SECRETS_VARIABLE} <= given


def test_failed_messages_of_a_batch_are_retried_alone() -> None:
    """The intake reports which messages failed, and the visibility timeout is long enough."""
    [mapping] = of_type("AWS::Lambda::EventSourceMapping").values()
    queue = of_type("AWS::SQS::Queue")["IntakeQueue"]
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    timeout_s = of_type("AWS::Lambda::Function")["ApiFunction"]["Timeout"]
    assert queue["VisibilityTimeout"] >= 6 * timeout_s
    assert queue["RedrivePolicy"]["maxReceiveCount"] > 1
    assert queue["SqsManagedSseEnabled"]


def test_a_domain_and_a_web_acl_belong_to_the_public_stage() -> None:
    """Both are optional; callbacks then name the domain, as the output does."""
    [mapping] = of_type("AWS::ApiGateway::BasePathMapping").values()
    [stage] = of_type("AWS::ApiGateway::Stage")
    assert mapping["Stage"] == {"Ref": stage}
    [acl] = of_type("AWS::WAFv2::WebACLAssociation").values()
    assert acl["ResourceArn"]["Fn::Sub"].endswith(f"::/restapis/${{Api}}/stages/${{{stage}}}")
    url = variables("CallbacksTask")["BATCHWAY_PUBLIC_URL"]
    assert transformed()["Outputs"]["Url"]["Value"] == url
    assert chosen(url, "HasDomain") == {"Fn::Sub": "https://${DomainName}"}


def test_a_private_api_answers_through_its_endpoint_alone() -> None:
    """And is a regional, public one where no endpoint is named."""
    [api] = of_type("AWS::ApiGateway::RestApi").values()
    private, public = chosen(api, "IsPrivate"), chosen(api)
    endpoint = {"Ref": "PrivateEndpointId"}
    assert private["EndpointConfiguration"] == {"Types": ["PRIVATE"], "VpcEndpointIds": [endpoint]}
    assert public["EndpointConfiguration"] == {"Types": ["REGIONAL"]}
    [statement] = private["Body"]["x-amazon-apigateway-policy"]["Statement"]
    assert statement["Condition"] == {"StringEquals": {"aws:SourceVpce": endpoint}}
    assert "x-amazon-apigateway-policy" not in public["Body"]
