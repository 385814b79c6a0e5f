"""template.yaml and the templates that it nests, after AWS' transforms, as one."""

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
NESTED = {
    part: ROOT / "infra" / "aws" / f"{part}.yaml" for part in ("data", "services", "front", "pool")
}


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
    """All templates after their transforms with these parameters, as one: a parameter of a nested
    template has the name of what it is given, a parameter of template.yaml or a resource."""
    whole = _translated(written(), parameters)
    for path in NESTED.values():
        part = _translated(yaml.load(path.read_text(), _Loader), parameters)
        assert not part["Resources"].keys() & whole["Resources"].keys()
        for section in ("Resources", "Conditions"):
            whole[section] |= part.get(section, {})
        whole["Outputs"] |= {
            name: output for name, output in part.get("Outputs", {}).items() if name == "Url"
        }
    return whole


def _translated(written: dict[str, Any], parameters: dict[str, str]) -> dict[str, Any]:
    """One template after AWS' transforms."""
    from samtranslator.parser.parser import Parser
    from samtranslator.translator.translator import Translator

    template = expanded(copy.deepcopy(written), written.get("Mappings", {}), {})
    for resource in template["Resources"].values():  # `sam package` replaces these
        if resource["Type"] == "AWS::Serverless::Function":
            resource["Properties"]["CodeUri"] = "s3://bucket/gateway.zip"
        if resource["Type"] == "AWS::Serverless::Application":
            resource["Properties"]["Location"] = "https://bucket/nested.yaml"
    translator = Translator({}, Parser())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        made: dict[str, Any] = translator.translate(template, {"Release": ""} | parameters)
    return made


def data() -> dict[str, Any]:
    """The template of what outlives the stack, as written."""
    return dict(yaml.load(NESTED["data"].read_text(), _Loader))


def expanded(part: Any, mappings: dict[str, Any], values: dict[str, str]) -> Any:
    """A part of a template after Fn::ForEach over lists, as the transform AWS::LanguageExtensions
    makes it, with the texts of mappings joined; `values` are those of the loops around it."""
    match part:
        case {"Ref": str(name)} if name in values:
            return values[name]
        case {"Fn::FindInMap": [str(table), key, str(column)]}:
            return mappings[table][expanded(key, mappings, values)][column]
        case {"Fn::Join": [" ", [{"Fn::FindInMap": _}, *_] as parts]}:
            return " ".join(expanded(parts, mappings, values))
        case {"Ref": {"Fn::Sub": str(text)}}:
            return {"Ref": expanded(text, mappings, values)}
        case {"Fn::GetAtt": [{"Fn::Sub": str(text)}, str(attribute)]}:
            return {"Fn::GetAtt": [expanded(text, mappings, values), attribute]}
        case dict():
            found: dict[str, Any] = {}
            for key, value in part.items():
                if key.startswith("Fn::ForEach::"):
                    name, items, body = value
                    for item in items:
                        found |= expanded(body, mappings, values | {name: item})
                else:
                    found[expanded(key, mappings, values)] = expanded(value, mappings, values)
            return found
        case list():
            return [expanded(one, mappings, values) for one in part]
        case str():
            for name, value in values.items():
                part = part.replace(f"${{{name}}}", value)
    return part


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


def variables(name: str) -> dict[str, Any]:
    """The environment of a function or of a task's container."""
    if name in of_type("AWS::ECS::TaskDefinition"):
        return {pair["Name"]: pair["Value"] for pair in container(name)["Environment"]}
    return dict(of_type("AWS::Lambda::Function")[name]["Environment"]["Variables"])


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
    "arn:aws:kms:eu-central-1:123456789012:key/k", "vpce-0a1b2c3d",
    "BATCHWAY_POLL_S=1 BATCHWAY_LANE_BOUNDS=interactive=2s,standard=9s",
)  # fmt: skip
"""Texts of which each pattern in the template takes one."""


def _may_be(declared: dict[str, Any], value: str) -> bool:
    kind, pattern = declared["Type"], declared.get("AllowedPattern", ".*")
    items = value.split(",") if kind.startswith(("List", "Comma")) else [value]
    is_id = "AWS::" not in kind or kind.partition("EC2::")[2].lower().startswith(value[:3])
    return is_id and all(re.fullmatch(pattern, item) for item in items)
