"""The template's parameters, from an operator's file to what SAM hands to CloudFormation."""

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.aws import parameters
from infra.aws.parameters import DeployError
from tests.aws.template import ROOT, chosen_values, written

SAM_PYTHON = ROOT / ".venv-sam" / "bin" / "python"
NEEDED = {
    "VpcId": "vpc-1", "PrivateSubnetIds": "subnet-1,subnet-2",
    "WorkerImageUri": "example/worker:1", "ServicesImageUri": "example/services:1",
}  # fmt: skip
needs_sam = pytest.mark.skipif(not SAM_PYTHON.exists(), reason="scripts/setup-sam has not run")

READ = """
import json, sys
from pathlib import Path
from samcli.cli.types import CfnParameterOverridesType
from samcli.commands.deploy.deploy_context import DeployContext
from samcli.lib.config.samconfig import SamConfig
from samcli.yamlhelper import yaml_parse

overrides = SamConfig(".").get_all(["deploy"], "parameters")["parameter_overrides"]
template = yaml_parse(Path("template.yaml").read_text())
for given in sys.argv[1:]:
    Path(".aws-sam/parameters.yaml").write_text(Path(given).read_text())
    merged = DeployContext.merge_parameters(
        template, CfnParameterOverridesType().convert(overrides, None, None)
    )
    print(json.dumps({one["ParameterKey"]: one.get("ParameterValue") for one in merged}))
"""
SAVE = """
import json, sys
from samcli.commands.deploy.guided_config import GuidedConfig
from samcli.lib.config.samconfig import SamConfig

config, answers = SamConfig("."), json.loads(sys.argv[1])
said = [f"{n}={GuidedConfig.quote_parameter_values(v)}" for n, v in answers.items()]
config.put(["deploy"], "parameters", "parameter_overrides", " ".join(said))
config.put(["deploy"], "parameters", "region", "eu-north-1")
config.flush()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with the real template and settings, and files in place of the sources."""
    for name in ("template.yaml", "samconfig.toml", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in parameters.SOURCES:
        if not name.startswith(":") and not (ROOT / name).is_dir():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("1")
        elif not name.startswith(":"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "a.py").write_text("1")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARAMETERS", raising=False)
    return tmp_path


def own(**values: Any) -> None:
    Path("deploy.local.json").write_text(json.dumps(NEEDED | values))


def by_sam(program: str, *arguments: str) -> str:
    environ = {**os.environ, "SAM_CLI_TELEMETRY": "0"}
    done = subprocess.run(
        [SAM_PYTHON, "-c", program, *arguments], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusals(**values: str) -> dict[str, str]:
    return dict(parameters.faults(NEEDED | values))


@pytest.mark.campaign
@needs_sam
def test_every_parameter_is_set_changed_and_cleared(folder: Path) -> None:
    """Through SAM's own parser, which gets a value for each parameter: it keeps none of before. A
    value that is left out is the template's default of now."""
    wanted: list[dict[str, str]] = []
    files: list[str] = []
    beside = {"CacheNodeType": "cache.m7g.large", "AlarmTopicArn": "arn"}
    beside["CertificateArn"] = "arn:aws:acm:eu-central-1:123456789012:certificate/c"

    def deployed(**values: Any) -> None:
        values = beside | values  # what rules ask for
        own(**values)
        parameters.prepare()
        files.append(str(shutil.copy(parameters.GIVEN, folder / f"{len(files)}.json")))
        wanted.append(parameters.complete({n: parameters._text(v) for n, v in values.items()}))

    for name in written()["Parameters"].keys() - {"Release"}:
        for value in chosen_values(name):
            deployed(**{name: value})
    deployed()
    texts = ["a b", 'say "x=1"', "it's", '"quoted"', '"', "\\\\", " a,b ", "ü😀", "yes: no # x"]
    chance = random.Random(0)
    texts += ["".join(chance.choices("\\\"' a,=", k=6)) for _ in range(100)]
    for text in texts:
        deployed(CacheSnapshotName=text)
    template = folder / "template.yaml"
    template.write_text(
        re.sub(r"(?s)(  ColdStartS:.*?Default: )\d+", r"\g<1>777", template.read_text())
    )
    deployed()
    found = [json.loads(line) for line in by_sam(READ, *files).splitlines()]

    assert found[-1]["ColdStartS"] == "777"
    for given, expected in zip(found, wanted, strict=True):
        release = given.pop("Release")
        assert re.fullmatch("[0-9a-f]{64}", release)
        expected.pop("Release")
        assert given == NEEDED | expected


def test_the_functions_change_with_the_code_and_with_each_parameter(folder: Path) -> None:
    """Lambda publishes a version where Release changes, and only there."""

    def release(**values: str) -> str:
        own(**values)
        parameters.prepare()
        return str(json.loads(parameters.GIVEN.read_text())["Release"])

    first = release()
    assert release() == first
    assert release(ColdStartS="301") != first
    (folder / "gateway" / "a.py").write_text("2")
    assert release() != first


@needs_sam
def test_answers_to_the_guided_deployment_become_own_values(folder: Path) -> None:
    """Those that differ from a default; the next deployment follows the template again."""
    answers = parameters.complete(NEEDED) | {
        "MaxWorkers": "3", "CallbackTargets": 's3:a b/*,"c"', "Release": "0" * 64,
    }  # fmt: skip
    by_sam(SAVE, json.dumps(answers))

    expected = NEEDED | {"MaxWorkers": "3", "CallbackTargets": 's3:a b/*,"c"'}
    assert parameters.own_values() == expected
    assert json.loads(Path("deploy.local.json").read_text()) == expected
    settings = Path("samconfig.toml").read_text()
    assert f'parameter_overrides = "file://{parameters.GIVEN}"' in settings
    assert "eu-north-1" in settings
    assert parameters.own_values() == expected


def test_settings_that_hide_the_file_are_refused(folder: Path) -> None:
    settings = Path("samconfig.toml")
    text = settings.read_text()
    for other in ('["VpcId=1"]', '"file://other.json"', '""'):
        settings.write_text(
            re.sub("(?m)^parameter_overrides = .*$", f"parameter_overrides = {other}", text)
        )
        with pytest.raises(DeployError, match=r"samconfig\.toml: must say parameter_overrides"):
            parameters.own_values()


@pytest.mark.parametrize("name", sorted(written()["Parameters"]))
def test_a_value_is_held_against_its_declaration(name: str) -> None:
    """Each parameter: what its type, its range, its names and its pattern allow, and no other."""
    declared = written()["Parameters"][name]
    for value in chosen_values(name):
        assert name not in refusals(**{name: value}), value
    wrong = []
    if "AllowedValues" in declared:
        wrong += ["true", "True", "YES", "unknown", "", "yes "]
    if declared["Type"] == "Number":
        wrong += ["true", "", "1,5", "nan", "inf", "1e3", "0x10", "one"]
    if "MinValue" in declared:
        wrong.append(str(declared["MinValue"] - 1))
    if "MaxValue" in declared:
        wrong.append(str(declared["MaxValue"] + 1))
    if "AllowedPattern" in declared:
        wrong.append(" no such thing! ")
    if "AWS::" in declared["Type"]:
        wrong.append("")
    for value in wrong:
        assert repr(value) in refusals(**{name: value})[name]


def test_a_missing_and_an_unknown_parameter_are_named() -> None:
    """With what is meant; JSON's true is not yes."""
    assert "private subnets" in dict(parameters.faults({}))["PrivateSubnetIds"].lower()
    assert refusals(MaxWorker="3") == {
        "MaxWorker": "is no parameter of template.yaml; MaxWorkers is"
    }
    assert refusals(Xyz="3") == {"Xyz": "is no parameter of template.yaml"}
    assert refusals(WithCallbacks=parameters._text(True)) == {
        "WithCallbacks": "must be one of yes, no; it is 'true'"
    }


def test_rules_of_the_template_hold_before_anything_is_built() -> None:
    """CloudFormation checks them only when images are built."""
    rules = written()["Rules"]
    broken = refusals(
        FlowsFile="s3://bucket/models.yaml", WithBatches="no", Durability="durable",
        CacheNodeType="cache.t4g.small", MonthlyBudgetUsd="10",
    )  # fmt: skip
    assert {"FlowsHaveARunner", "DurableNodesAreLarge", "BudgetsTellSomebody"} <= set(broken)
    for name, problem in broken.items():
        assert problem == rules[name]["Assertions"][0]["AssertDescription"]
    assert refusals() == {}


@pytest.mark.parametrize("text", ["[]", "{", '"a"', "\udcff", "null"])
def test_a_file_that_is_no_object_is_named(folder: Path, text: str) -> None:
    Path("deploy.local.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DeployError, match=r"deploy\.local\.json: must be a JSON object"):
        parameters.own_values()


def test_another_file_is_named_by_a_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters.own_values() == {}
    monkeypatch.setenv("PARAMETERS", "prod.json")
    with pytest.raises(DeployError, match=r"no file prod\.json"):
        parameters.own_values()
    Path("prod.json").write_text('{"PrivateSubnetIds": ["a", "b"], "MaxWorkers": 3, "Model": null}')
    assert parameters.own_values() == {"PrivateSubnetIds": "a,b", "MaxWorkers": "3", "Model": ""}


def test_functions_and_images_are_of_the_same_files(folder: Path) -> None:
    """Of those that are there, committed or not: images of other files are refused before the
    functions are built. Files that make neither change nothing."""
    registry = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/batchway-artifacts"
    first = parameters.tags({})
    own(**{name: f"{registry}:{tag}" for name, tag in first.items()})
    for name in ("docs/a.md", "samconfig.toml", "gateway/__pycache__/a.pyc", "infra/aws/pool.yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("a") as file:
            file.write("\n")
    assert parameters.tags({}) == first
    parameters.prepare()
    assert parameters.tags({"WorkerEngine": "own"}) != first

    for name in ("workers/new.py", "gateway/a.py", "Dockerfile.worker"):
        before = parameters.tags({})
        (folder / name).write_text(name)
        assert parameters.tags({}) != before, name
    with pytest.raises(DeployError, match="ImageUri is not of the files in this folder"):
        parameters.prepare()


def test_the_sources_are_all_that_the_images_copy() -> None:
    """And what the functions are made of."""
    script = (ROOT / "scripts" / "build-gateway").read_text()
    copied = set(re.findall(r"^cp (?:-R )?(.*) \"\$target\"$", script, re.M))
    used = {name for line in copied for name in line.split()}
    for dockerfile in ("Dockerfile.gateway", "Dockerfile.worker"):
        text = (ROOT / dockerfile).read_text()
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
            used |= set(line.split())
        used |= set(re.findall(r"type=bind,source=(\S+?),", text))
    assert {"contract", "locks/worker.txt"} <= used
    for name in used:
        assert name.partition("/")[0] in parameters.SOURCES, name


def test_an_installation_without_a_clone_says_so(folder: Path) -> None:
    shutil.rmtree(folder / ".git")
    with pytest.raises(DeployError, match="needs a clone"):
        parameters.sources_id()
