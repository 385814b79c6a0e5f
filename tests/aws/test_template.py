"""template.yaml as a whole: linters, parameters, dashboard."""

import json
import re
import subprocess
import sys

from infra.aws import pool_metrics
from tests.aws.template import (
    ROOT,
    TEMPLATE,
    of_type,
    transformed,
    written,
)


def test_linters_find_nothing() -> None:
    """cfn-lint, including warnings and informational messages."""
    program = "from cfnlint.runner import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--include-checks", "I", "--template", str(TEMPLATE)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout


def test_every_template_parameter_has_a_description() -> None:
    """And a default, unless it is specific to an account. Every parameter is in a group of the
    form."""
    parameters = written()["Parameters"]
    assert all(parameter.get("Description") for parameter in parameters.values())
    without = {name for name, parameter in parameters.items() if "Default" not in parameter}
    assert without == {"VpcId", "PrivateSubnetIds", "WorkerImageUri", "ServicesImageUri"}
    form = written()["Metadata"]["AWS::CloudFormation::Interface"]["ParameterGroups"]
    assert sorted(name for group in form for name in group["Parameters"]) == sorted(parameters)


def test_a_new_release_publishes_every_function() -> None:
    """`live` is a version, so a changed parameter reaches the functions by a new one only."""

    def versions(**parameters: str) -> set[str]:
        resources = transformed(**parameters)["Resources"].items()
        return {name for name, one in resources if one["Type"] == "AWS::Lambda::Version"}

    before, same = versions(Release="a" * 64), versions(Release="a" * 64)
    after = versions(Release="b" * 64, ColdStartS="60")
    assert before == same
    assert len(before) == 5
    assert not before & after
    assert not before & versions()  # without a release the code's address decides


def test_there_is_one_public_stage() -> None:
    [stage] = of_type("AWS::ApiGateway::Stage").values()
    assert stage["StageName"] == "live"
    deployments = of_type("AWS::ApiGateway::Deployment").values()
    assert not any("StageName" in deployment for deployment in deployments)


def test_old_versions_are_deleted() -> None:
    """SnapStart charges for each."""
    resources = transformed()["Resources"].values()
    kept = [r["DeletionPolicy"] for r in resources if r["Type"] == "AWS::Lambda::Version"]
    assert kept == ["Delete"] * 5


def test_the_dashboard_is_json() -> None:
    """It is a string in the template, which no linter checks. Every metric that it shows is
    emitted."""
    [board] = of_type("AWS::CloudWatch::Dashboard").values()
    body = re.sub(r"\$\{[^}]+\}", "x", board["DashboardBody"]["Fn::Sub"][0])
    assert len(json.loads(body)["widgets"]) == 8
    shown = set(re.findall(r'MetricName=\\"(\w+)', body))
    assert len(shown) == 4
    assert shown <= set(pool_metrics.UNITS)
