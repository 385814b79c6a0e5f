"""The template's parameters: what is declared, what an installation chose, what SAM is given.

    PARAMETERS=FILE python -m infra.aws.parameters      `sam build` runs it: see Makefile

FILE, else deploy.local.json, holds what differs from the template's defaults. SAM would keep the
present value of a parameter that it is not given: no value could be cleared, and no new default
would arrive. So SAM is given every parameter, in GIVEN.
"""

import difflib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

TEMPLATE = Path("template.yaml")
SAM_SETTINGS = Path("samconfig.toml")
GIVEN = Path(".aws-sam/parameters.yaml")  # JSON, which is YAML; SAM takes no .json
IMAGES = ("WorkerImageUri", "ServicesImageUri")
SOURCES = (
    ".dockerignore", "Dockerfile.gateway", "Dockerfile.worker", "LICENSE", "README.md",
    "batchway_client", "contract", "gateway", "infra", "locks", "pyproject.toml",
    "scripts/build-gateway", "workers", ":(exclude)infra/aws/*.yaml",
)  # fmt: skip
"""What images and functions are made of, as git's pathspecs."""
_BUILT = "-artifacts:"  # ends the name of the registry of scripts/images
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_ANSWER = re.compile(r'(\w+)=("(?:\\.|[^"\\])*"|\S+)')
_FUNCTIONS: dict[str, Callable[..., bool]] = {
    "Fn::And": lambda *parts: all(parts),
    "Fn::Contains": lambda parts, one: str(one) in map(str, parts),
    "Fn::Equals": lambda one, other: str(one) == str(other),
    "Fn::Not": lambda one: not one,
    "Fn::Or": lambda *parts: any(parts),
}


class DeployError(Exception):
    """The deployment cannot go on. The message says what to do."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loads YAML with CloudFormation's short forms of functions."""


def _function(loader: Any, suffix: str, node: Any) -> dict[str, Any]:
    name = suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}"
    if node.id == "scalar":
        return {name: node.value}
    make = loader.construct_sequence if node.id == "sequence" else loader.construct_mapping
    return {name: make(node, deep=True)}


_Loader.add_multi_constructor("!", _function)


@functools.cache
def loaded(text: str) -> dict[str, Any]:
    """A template as CloudFormation reads it. Callers must not change it."""
    return dict(yaml.load(text, _Loader))  # noqa: S506


def path() -> Path:
    return Path(os.environ.get("PARAMETERS", "deploy.local.json"))


def own_values() -> dict[str, str]:
    """What the file says, as CloudFormation writes it. Raises DeployError."""
    file = path()
    _take_answers(file)
    try:
        found = json.loads(file.read_text("utf-8"))
        return {name: _text(value) for name, value in found.items()}
    except FileNotFoundError:
        if "PARAMETERS" in os.environ:
            raise DeployError(f"PARAMETERS: no file {file}") from None
        return {}
    except (OSError, ValueError, AttributeError) as exc:
        raise DeployError(f"{file}: must be a JSON object of parameters: {exc}") from exc


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def write(path: Path, values: Mapping[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def complete(own: Mapping[str, str]) -> dict[str, str]:
    """Every parameter that has a value: an own one, or the template's default."""
    declared = loaded(TEMPLATE.read_text("utf-8"))["Parameters"]
    defaults = {name: str(one["Default"]) for name, one in declared.items() if "Default" in one}
    return defaults | {name: value for name, value in own.items() if name in declared}


def faults(own: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names with what is wrong with them by the template's own declaration, without asking AWS."""
    found, values = loaded(TEMPLATE.read_text("utf-8")), complete(own)
    declared = found["Parameters"]
    for name in own.keys() - declared:
        near = difflib.get_close_matches(name, declared, 1)
        yield name, f"is no parameter of template.yaml{f'; {near[0]} is' if near else ''}"
    for name, one in declared.items():
        if name not in values:
            yield name, f"is missing: {' '.join(one.get('Description', '').split())}"
        elif problem := _problem(one, values[name]):
            yield name, f"{problem}; it is {values[name]!r}"
    for name, rule in found.get("Rules", {}).items():
        for assertion in rule["Assertions"] if _holds(rule.get("RuleCondition"), values) else ():
            if not _holds(assertion["Assert"], values):
                yield name, assertion["AssertDescription"]
    for name in [name for name in IMAGES if _BUILT in own.get(name, "")]:
        if not own[name].endswith(f":{tags(values)[name]}"):
            yield name, "is not of the files in this folder: run scripts/images"


def _problem(one: Mapping[str, Any], value: str) -> str:
    """Why CloudFormation would refuse a value, or nothing."""
    kind, allowed = str(one["Type"]), [str(value) for value in one.get("AllowedValues", ())]
    is_list = kind == "CommaDelimitedList" or kind.startswith("List<")
    for item in map(str.strip, value.split(",")) if is_list else [value]:
        if allowed and item not in allowed:
            return f"must be one of {', '.join(allowed)}"
        if "Number" in kind and not _NUMBER.fullmatch(item):
            return "must be a number"
        size, end = (float(item), "Value") if "Number" in kind else (len(item), "Length")
        least, most = one.get(f"Min{end}", size), one.get(f"Max{end}", size)
        if not least <= size <= most:
            return f"must be {least} or more" if size < least else f"must be {most} or less"
        if not re.fullmatch(one.get("AllowedPattern", "(?s:.*)"), item):
            return str(one.get("ConstraintDescription", f"must match {one['AllowedPattern']}"))
        if "AWS::" in kind and not item:
            return "must not be empty"
    return ""


def _holds(part: Any, values: Mapping[str, str]) -> Any:
    """What a rule's function comes to; no condition always holds."""
    if not isinstance(part, dict):
        return True if part is None else part
    [(name, operands)] = part.items()
    if name == "Ref":
        return values.get(operands, "")
    return _FUNCTIONS[name](*(_holds(operand, values) for operand in operands))


def for_sam(value: str) -> str:
    """A value such that SAM reads exactly this one: it takes quotes and backslashes away, from a
    file's values twice."""
    for _ in range(2):
        if re.search(r"""^["']|\\[ "']""", value):
            value = '"' + re.sub(r"""(?=\\[ "'])""", r"\\", value) + '"'
    return value


def _take_answers(file: Path) -> None:
    """Moves what `sam deploy --guided` saved in samconfig.toml into the file, except defaults, and
    lets SAM read GIVEN again. Raises DeployError."""
    text, line = SAM_SETTINGS.read_text("utf-8"), f'parameter_overrides = "file://{GIVEN}"'
    saved = tomllib.loads(text)["default"]["deploy"]["parameters"].get("parameter_overrides")
    if saved == f"file://{GIVEN}":
        return
    if not isinstance(saved, str) or not (answers := _ANSWER.findall(saved)):
        raise DeployError(f"{SAM_SETTINGS}: must say {line}; parameters belong into {file}")
    given = {name: re.sub('^"|"$', "", value).replace('\\"', '"') for name, value in answers}
    same = complete({}) | {"Release": given.get("Release", "")}
    write(file, dict(given.items() - same.items()))
    SAM_SETTINGS.write_text(
        re.sub(r"(?m)^parameter_overrides = .*$", lambda _: line, text), encoding="utf-8"
    )


def tags(values: Mapping[str, str]) -> dict[str, str]:
    """What images of the present files are called: by Docker's target, and files."""
    files, target = sources_id(), "own" if values.get("WorkerEngine") == "own" else "vllm"
    return {"WorkerImageUri": f"{target}-{files}", "ServicesImageUri": f"services-{files}"}


def sources_id() -> str:
    """Names the present contents of SOURCES, committed or not. Raises DeployError."""
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git("add", "--all", "--", *SOURCES, **index)
        return git("write-tree", **index)[:12]


def git(*arguments: str, **environ: str) -> str:
    """What git prints. Raises DeployError."""
    command, all_environ = ["git", *arguments], {**os.environ, **environ}
    done = subprocess.run(command, env=all_environ, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise DeployError(f"git {arguments[0]} failed; it needs a clone: {done.stderr.strip()}")
    return done.stdout.strip()


def prepare() -> None:
    """Writes GIVEN. Raises DeployError for the first fault; where there are no own values, the
    functions can be built, but not deployed."""
    own = own_values()
    for name, problem in faults(own) if own else ():
        raise DeployError(f"{path()}: {name} {problem}")
    values = complete(own)
    if own:  # the functions publish a version for new code, and for changed parameters
        made_of = json.dumps([sources_id(), sorted(values.items())])
        values["Release"] = hashlib.sha256(made_of.encode()).hexdigest()
    write(GIVEN, {name: for_sam(value) for name, value in values.items()})


if __name__ == "__main__":
    try:
        prepare()
    except DeployError as exc:
        sys.exit(str(exc))
