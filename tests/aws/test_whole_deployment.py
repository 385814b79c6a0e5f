"""A whole deployment by sam, as documented, against moto, whose CloudFormation knows no SAM: there
the stack's resources are left out."""

import ast
import json
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml  # type: ignore[import-untyped]
from moto.core.config import default_user_config

from infra.aws.parameters import complete
from tests.aws.template import ROOT, written
from tests.aws.test_deploy import bucket
from tests.aws.test_preflight import IMAGES, REGION, Network
from tests.aws.test_second_model import with_second_pool

__all__ = ["bucket"]
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.long,
    pytest.mark.timeout(1200),  # builds of each function
    pytest.mark.skipif(not (ROOT / ".venv-sam").exists(), reason="scripts/setup-sam has not run"),
]


@pytest.fixture
def nested(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Makes moto take the template, with one resource in place of all; the nested stacks of each
    deployment, which must be uploaded."""
    from moto.cloudformation import utils

    read: Any = utils.get_stack_from_s3_url
    found: list[list[str]] = []

    def shortened(*given: Any, **named: Any) -> str:
        body: str = read(*given, **named)
        # As sam writes it: without short forms of functions.
        template = yaml.safe_load(body)
        template.pop("Transform", None)
        urls = {
            name: one["Properties"]["Location"]
            for name, one in template["Resources"].items()
            if "Location" in one["Properties"]
        }
        assert all(url.startswith("http") for url in urls.values())
        found.append(sorted(urls))
        template["Resources"] = {"T": {"Type": "AWS::SNS::Topic"}}
        for section in ("Conditions", "Rules", "Outputs"):
            template.pop(section, None)
        return json.dumps(template)

    monkeypatch.setattr("moto.cloudformation.responses.get_stack_from_s3_url", shortened)
    monkeypatch.setitem(default_user_config, "lambda", {"use_docker": False})
    return found


class Clone:
    """A copy of the files here, in which sam may change samconfig.toml. The environment's region is
    another one than the installation's."""

    def __init__(self, folder: Path, aws_environ: dict[str, str]) -> None:
        self.folder = folder
        files = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, files.split("\0")):
            if (ROOT / name).exists() and not name.startswith(("tests/", "docs/", "bench/")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
        for name in (".venv-sam", ".venv"):
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)
        url = aws_environ["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")  # as moto wants it
        self.environ = {**os.environ, "AWS_ENDPOINT_URL": url, "SAM_CLI_TELEMETRY": "0"}
        self.environ |= dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "us-west-2")
        network = Network()
        network.route(NatGatewayId=network.nat())
        self.own = network.parameters | IMAGES | {"WithApiLogRole": "yes"}
        self.own["FlowsFile"] = "s3://b/a file"

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def build(self, **values: str) -> None:
        (self.folder / "deploy.local.json").write_text(json.dumps(self.own | values))
        self.run(".venv-sam/bin/sam", "build")

    def deploy(self, bucket: str) -> dict[str, str]:
        """Returns the stack's parameters."""
        # moto does not make the bucket that sam would make for itself.
        where = (f"--region={REGION}", "--no-resolve-s3", f"--s3-bucket={bucket}")
        what = ("--no-confirm-changeset", "--no-fail-on-empty-changeset")
        self.run(".venv-sam/bin/sam", "deploy", *where, *what)
        return deployed()


def deployed() -> dict[str, str]:
    """The stack's parameters. moto shows a list as Python does."""
    stacks = boto3.client("cloudformation").describe_stacks(StackName="batchway")["Stacks"]
    found = {one["ParameterKey"]: one["ParameterValue"] for one in stacks[0]["Parameters"]}
    return {
        name: ",".join(ast.literal_eval(value)) if value.startswith("['") else value
        for name, value in found.items()
    }


@pytest.fixture
def clone(aws_environ: dict[str, str], tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone", aws_environ)


def test_a_whole_deployment_in_another_region_than_the_default(
    clone: Clone, bucket: str, nested: list[list[str]]
) -> None:
    """Checked, built, uploaded, deployed, changed, given a second model, destroyed."""
    (clone.folder / "deploy.local.json").write_text(json.dumps(clone.own))
    clone.run("scripts/preflight", f"--region={REGION}")
    clone.build()
    first = clone.deploy(bucket)
    assert first["VpcId"] == clone.own["VpcId"]
    assert first["FlowsFile"] == "s3://b/a file"
    assert len(first["Release"]) == 64
    template = clone.folder / "template.yaml"
    template.write_text(with_second_pool(template.read_text()))
    clone.build(MaxWorkers="3", FlowsFile="")
    again = clone.deploy(bucket)
    assert (again["MaxWorkers"], again["FlowsFile"]) == ("3", "")
    assert again["Release"] != first["Release"]
    parts = ["Data", "Front", "Pool", "Services"]
    assert nested[0] == parts
    assert nested[-1] == sorted([*parts, "PoolOfOther"])
    destroyed = clone.run("scripts/destroy", "--yes", f"--region={REGION}")
    assert "Left, and paid for" in destroyed


_ANSI = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
_QUESTION = re.compile(r"([^\n]*?) ?\[([^\n]*)\]: $")


def converse(
    command: Sequence[str], answers: Mapping[str, str], *, folder: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """Answers each question of a program at a terminal by its beginning, all others with Enter;
    returns the questions with what they offer. Raises AssertionError with all output if the program
    fails."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        command, cwd=folder, env=dict(environ), stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    text, begun, asked = "", 0, {}
    with suppress(OSError):  # the program has closed its end
        while part := os.read(terminal, 65_536):
            text += part.decode(errors="replace")
            said = _ANSI.sub("", text[begun:]).replace("\r", "")
            if (question := _QUESTION.search(said)) is not None:
                name = question[1].strip()
                asked[name] = question[2]
                begun = len(text)
                answer = next((a for q, a in answers.items() if name.startswith(q)), "")
                os.write(terminal, f"{answer}\n".encode())
    os.close(terminal)
    assert process.wait(timeout=60) == 0, text
    return asked


ANSWERS = {
    "MaxWorkers": "3",
    "FlowsFile": "s3://b/another file.yaml",
    "WorkerOptions": "--dtype bfloat16 --max-num-seqs 64",
    "WithFunctionUrl": "yes",
    "CallbackQueueArns": "arn:aws:sqs:eu-central-1:123456789012:a,"
    "arn:aws:sqs:eu-central-1:123456789012:b",
}


@pytest.mark.usefixtures("nested")
def test_the_answers_of_a_guided_deployment_reach_the_stack(clone: Clone, bucket: str) -> None:
    """At a terminal. Each parameter is asked for by its name, with its present value; Enter keeps
    it. The next build takes the answers over."""
    cloudformation = boto3.client("cloudformation")
    managed = {
        "Resources": {"T": {"Type": "AWS::SNS::Topic"}},
        "Outputs": {"SourceBucket": {"Value": bucket}},
    }
    cloudformation.create_stack(
        StackName="aws-sam-cli-managed-default",
        TemplateBody=json.dumps(managed),
        Tags=[{"Key": "ManagedStackSource", "Value": "AwsSamCli"}],
    )
    clone.build()

    def guided(answers: dict[str, str]) -> dict[str, str]:
        asked = converse(
            [".venv-sam/bin/sam", "deploy", "--guided"],
            {f"Parameter {name}": answer for name, answer in answers.items()}
            | {"AWS Region": REGION, "Deploy this changeset?": "y"},
            folder=clone.folder,
            environ=clone.environ,
        )
        return {q.removeprefix("Parameter "): d for q, d in asked.items() if "Parameter" in q}

    offered = guided(ANSWERS)
    expected = complete(clone.own) | {"Release": offered["Release"]}
    assert offered == expected
    assert offered.keys() == written()["Parameters"].keys()
    assert deployed() == expected | ANSWERS

    python = ".venv-sam/bin/python"
    clone.run(python, "-m", "infra.aws.parameters")  # as `sam build` does
    taken = json.loads((clone.folder / "deploy.local.json").read_text())
    assert taken == {n: v for n, v in clone.own.items() if v != complete({}).get(n)} | ANSWERS
    for name in ("batchway", "aws-sam-cli-managed-default"):
        cloudformation.delete_stack(StackName=name)
