"""template.yaml and what it nests as a whole: linters, lengths, parameters, dashboards."""

import json
import re
import subprocess
import sys

import pytest

from infra.aws import images, pool_metrics
from tests.aws.template import (
    NESTED,
    ROOT,
    TEMPLATE,
    as_list,
    of_type,
    transformed,
    written,
)


@pytest.mark.campaign
def test_linters_find_nothing() -> None:
    """cfn-lint, including warnings and informational messages: among others, nothing refers to what
    a condition leaves out."""
    program = "from cfnlint.runner import main; main()"
    files = [str(path) for path in (TEMPLATE, *NESTED.values(), images.TEMPLATE)]
    done = subprocess.run(
        [sys.executable, "-c", program, "--include-checks", "I", "--template", *files],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout


def test_every_template_parameter_has_a_description() -> None:
    """And a default, unless it is specific to an account."""
    parameters = written()["Parameters"]
    assert all(parameter.get("Description") for parameter in parameters.values())
    without = {name for name, parameter in parameters.items() if "Default" not in parameter}
    assert without == {"VpcId", "PrivateSubnetIds", "WorkerImageUri", "ServicesImageUri"}


def test_no_template_is_longer_than_a_page_that_is_read() -> None:
    for path in (TEMPLATE, *NESTED.values()):
        assert len(path.read_text().splitlines()) <= 700, path


def test_a_parameter_goes_to_what_has_its_name() -> None:
    """Unchanged: from template.yaml, or from the outputs of another part. cfn-lint compares the
    names with those that a part declares."""
    made = {"Services", "Front", "Pool", "Data"}
    nested = {name: written()["Resources"][name]["Properties"]["Parameters"] for name in made}
    for name, given in ((n, v) for part in nested.values() for n, v in part.items()):
        match given:
            case {"Ref": str(source)} | {"Fn::Join": [",", {"Ref": str(source)}]}:
                expected = {"Models": "ServedModelName", "Installation": "AWS::StackName"}
                assert source == expected.get(name, name)
            case {"Fn::GetAtt": [str(part), output]}:
                assert (part in made, output) == (True, f"Outputs.{name}")
    for name in ("Services", "Front", "Pool"):
        assert {"Fn::GetAtt": ["Data", "Outputs.CacheAddress"]} in nested[name].values()


def test_what_is_kept_outlives_the_stack() -> None:
    """A deleted stack leaves cache, objects and secrets; a first deployment that fails, nothing."""
    policies = {name: one.get("DeletionPolicy") for name, one in written()["Resources"].items()}
    assert policies == {
        "Data": "RetainExceptOnCreate", "Services": None, "Front": None, "Pool": None,
        "Budget": None,
    }  # fmt: skip


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
    shown: set[str] = set()
    num_widgets = 0
    for board in of_type("AWS::CloudWatch::Dashboard").values():
        body = re.sub(r"\$\{[^}]+\}", "x", as_list(board["DashboardBody"]["Fn::Sub"])[0])
        num_widgets += len(json.loads(body)["widgets"])
        shown |= set(re.findall(r'MetricName=\\"(\w+)', body))
    assert num_widgets == 8
    assert len(shown) == 4
    assert shown <= set(pool_metrics.UNITS)
