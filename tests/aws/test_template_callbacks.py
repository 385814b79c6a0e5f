"""Callbacks in template.yaml: delivered, signed, and limited to the operator's targets."""

import json
import re

import pytest

from gateway.settings import variable
from infra.callbacks_command import AWS_VARIABLE, KEY_VARIABLE
from tests.aws.template import (
    container,
    of_type,
    transformed,
    written,
)
from workers.callbacks.deliverer import MIN_KEY_CHARS


def test_callbacks_are_delivered_and_signed() -> None:
    """By default, with everything that `batchway callbacks` needs."""
    assert written()["Parameters"]["WithCallbacks"]["Default"] == "yes"
    given = container("CallbacksTask")
    variables = {pair["Name"]: pair["Value"] for pair in given["Environment"]}
    secrets = {pair["Name"]: pair["ValueFrom"]["Fn::Sub"] for pair in given["Secrets"]}
    assert set(secrets) == {"REDIS_PASSWORD", KEY_VARIABLE}
    made = of_type("AWS::SecretsManager::Secret")["CallbackKeySecret"]["GenerateSecretString"]
    assert made["GenerateStringKey"] == KEY_VARIABLE
    assert secrets[KEY_VARIABLE] == f"${{CallbackKeySecret}}:{KEY_VARIABLE}::"
    assert made["PasswordLength"] >= MIN_KEY_CHARS
    # Functions accept the targets that the callbacks task may reach.
    for function in ("ApiFunction", "StreamFunction"):
        theirs = of_type("AWS::Lambda::Function")[function]["Environment"]["Variables"]
        for name in (AWS_VARIABLE, variable("object_store")):
            assert theirs[name] == variables[name]


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
