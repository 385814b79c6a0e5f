"""template.yaml as a whole: linters, parameters, dashboard."""

import json
import re
import subprocess
import sys

from infra.aws import fleet_lines
from tests.aws.template import (
    ROOT,
    TEMPLATE,
    of_type,
    written,
)


def test_linters_find_nothing() -> None:
    """cfn-lint, including warnings and informational messages."""
    program = "from cfnlint.runner import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--non-zero-exit-code", "informational", str(TEMPLATE)],
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


def test_the_dashboard_is_json() -> None:
    """It is a string in the template, which no linter checks. Every metric that it shows is
    emitted."""
    [board] = of_type("AWS::CloudWatch::Dashboard").values()
    body = re.sub(r"\$\{[^}]+\}", "x", board["DashboardBody"]["Fn::Sub"])
    assert len(json.loads(body)["widgets"]) == 8
    shown = set(re.findall(r'MetricName=\\"(\w+)', body))
    assert len(shown) == 4
    assert shown <= set(fleet_lines.UNITS)
