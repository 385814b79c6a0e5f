"""scripts/deploy: which account it uses, and what it does once the stack is deployed."""

from pathlib import Path
from typing import Any

import boto3
import pytest

from infra.aws import deployment

STACK = """{"Resources": {"T": {"Type": "AWS::SNS::Topic"}},
 "Outputs": {"Url": {"Value": "https://u/live"}, "ApiKeySecretArn": {"Value": "arn:s"},
             "HousekeeperFunctionName": {"Value": "keeper"}}}"""


def test_the_account_and_region_are_named(aws_environ: dict[str, str]) -> None:
    """Without a region the error says how to set one."""
    text = deployment.describe(boto3.session.Session())
    assert "account 123456789012" in text
    assert text.endswith("in eu-central-1")
    with pytest.raises(LookupError, match="AWS_REGION"):
        deployment.describe(NoRegion())


class NoRegion:
    """A session without a region."""

    region_name = None


def test_without_credentials_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert deployment.main([]) == 1
    assert "aws configure" in capsys.readouterr().err


def test_a_deployment_prints_a_first_call(aws_environ: dict[str, str], tmp_path: Path) -> None:
    """With the stack's own address and the ARN of its key's secret, but not the key."""
    boto3.client("cloudformation").create_stack(StackName="mine", TemplateBody=STACK)
    config = tmp_path / "c.toml"
    config.write_text('[default.deploy.parameters]\nstack_name = "mine"\n')
    found = deployment.outputs(boto3.client("cloudformation"), deployment.stack_name(config))
    text = deployment.next_steps(found)
    assert "curl -N https://u/live/v1/models" in text
    assert "--secret-id arn:s" in text
    config.write_text("")
    assert deployment.stack_name(config) == "batchway"


def test_a_failing_housekeeper_fails_the_deployment() -> None:
    """Without the function library no job is accepted."""

    class Lambda:
        def invoke(self, **_: Any) -> dict[str, str]:
            return {"FunctionError": "Unhandled"}

    with pytest.raises(deployment.NotDeployed, match="keeper failed"):
        deployment.load_library(Lambda(), "keeper")


def test_the_template_has_every_output_that_deploy_reads() -> None:
    text = (Path(__file__).resolve().parent.parent.parent / "template.yaml").read_text()
    outputs = text.partition("\nOutputs:")[2]
    for name in ("Url", "ApiKeySecretArn", "HousekeeperFunctionName"):
        assert f"\n  {name}:" in outputs
