"""template.yaml after SAM's transform, as CloudFormation gets it."""

import copy
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATE = ROOT / "template.yaml"


class _Loader(yaml.CSafeLoader):  # type: ignore[misc]
    """Loads YAML with CloudFormation's short forms of functions."""


def _function(loader: Any, suffix: str, node: Any) -> dict[str, Any]:
    name = suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}"
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        if suffix == "GetAtt":
            value = value.split(".", 1)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    return {name: value}


_Loader.add_multi_constructor("!", _function)


@functools.cache
def written() -> dict[str, Any]:
    """The template as written in the file. Callers must not change it."""
    loaded: dict[str, Any] = yaml.load(TEMPLATE.read_text(), _Loader)
    return loaded


@functools.cache
def transformed(**parameters: str) -> dict[str, Any]:
    """The template after SAM's transform with these parameters, as CloudFormation gets it."""
    from samtranslator.parser.parser import Parser
    from samtranslator.translator.translator import Translator

    template = copy.deepcopy(written())
    for resource in template["Resources"].values():
        if resource["Type"] == "AWS::Serverless::Function":  # `sam package` replaces it
            resource["Properties"]["CodeUri"] = "s3://bucket/gateway.zip"
    translator = Translator({}, Parser())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        made: dict[str, Any] = translator.translate(template, parameter_values=dict(parameters))
    return made


def of_type(kind: str) -> dict[str, dict[str, Any]]:
    """Properties of all resources of a type, by name."""
    resources = transformed()["Resources"].items()
    return {name: found.get("Properties", {}) for name, found in resources if found["Type"] == kind}


def functions() -> dict[str, dict[str, Any]]:
    """Properties of the functions that run our packages, by name."""
    found = of_type("AWS::Lambda::Function").items()
    return {name: function for name, function in found if "ZipFile" not in function["Code"]}


def statements() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every statement of every inline policy, with its resource's name."""
    for name, resource in transformed()["Resources"].items():
        properties = resource.get("Properties", {})
        documents = [policy["PolicyDocument"] for policy in properties.get("Policies", [])]
        if "PolicyDocument" in properties:
            documents.append(properties["PolicyDocument"])
        for document in documents:
            for statement in document["Statement"]:
                yield name, statement["Fn::If"][1] if "Fn::If" in statement else statement


def chosen(value: Any, *conditions: str) -> Any:
    """A part of the template where these conditions hold and no others do."""
    match value:
        case {"Fn::If": [condition, yes, no]}:
            return chosen(yes if condition in conditions else no, *conditions)
        case dict():
            parts = {name: chosen(part, *conditions) for name, part in value.items()}
            return {n: part for n, part in parts.items() if part != _NOTHING}
        case list():
            return [chosen(part, *conditions) for part in value]
    return value


_NOTHING = {"Ref": "AWS::NoValue"}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def container(task: str) -> dict[str, Any]:
    [found] = of_type("AWS::ECS::TaskDefinition")[task]["ContainerDefinitions"]
    return dict(found)


def arguments(task: str, *, worker_options: str | None = None) -> list[str]:
    """A task's command line, with each parameter replaced by its default or what is given."""
    holds = [] if worker_options is None else ["HasWorkerOptions"]
    command = chosen(container(task)["Command"], *holds)
    given = {"WorkerOptions": worker_options or ""}
    match command:
        case {"Fn::Split": [separator, {"Fn::Join": [_, parts]}]}:
            words = (_resolved(part, given) for part in parts if part != _NOTHING)
            return str(separator.join(words)).split(separator)
    return [_resolved(part, given) for part in command if part != _NOTHING]


def _resolved(value: Any, given: dict[str, str]) -> str:
    match value:
        case str():
            return value
        case {"Fn::Sub": str(text)}:
            return re.sub(r"\$\{([^}]+)\}", lambda name: _default(name[1]), text)
        case {"Ref": str(name)}:
            return given.get(name, _default(name))
    raise AssertionError(value)


def _default(name: str) -> str:
    """A parameter's default. References to resources become "x"."""
    return str(written()["Parameters"].get(name, {}).get("Default", "x"))


def chosen_values(name: str) -> list[str]:
    """Values that an operator may give a parameter, as its declaration says; "" where it may be
    cleared."""
    declared = written()["Parameters"][name]
    if "AllowedValues" in declared:
        return [str(value) for value in declared["AllowedValues"]]
    if declared["Type"] == "Number":
        least = declared.get("MinValue", 1)
        return [str(least), str(declared.get("MaxValue", least + 1))]
    given = [""] if declared.get("Default") == "" else [str(declared.get("Default", "given-1"))]
    return given + [value for value in EXAMPLES if _may_be(declared, value)][:2]


EXAMPLES = (
    "vpc-0a1b2c3d", "subnet-0a1b2c3d,subnet-1a1b2c3d", "name", "sun:05:00-sun:06:00", "a" * 64,
    "s3://bucket/a key.yaml", "arn:aws:sqs:eu-central-1:123456789012:jobs",
    "arn:aws:sns:eu-central-1:123456789012:jobs", "arn:aws:s3:::bucket/jobs/*",
    "arn:aws:events:eu-central-1:123456789012:event-bus/jobs",
    "arn:aws:lambda:eu-central-1:123456789012:function:jobs", "--dtype bfloat16",
    "BATCHWAY_POLL_S=1 BATCHWAY_LANE_BOUNDS=interactive=2s,standard=9s",
)  # fmt: skip
"""Texts of which each pattern in the template takes one."""


def _may_be(declared: dict[str, Any], value: str) -> bool:
    kind, pattern = declared["Type"], declared.get("AllowedPattern", ".*")
    items = value.split(",") if kind.startswith(("List", "Comma")) else [value]
    is_id = "AWS::" not in kind or kind.partition("EC2::")[2].lower().startswith(value[:3])
    return is_id and all(re.fullmatch(pattern, item) for item in items)
