"""One installation on AWS: its options on the command line, its parameters, its outputs.

Needs nothing but boto3: it runs in the virtual environment of the sam command line.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARAMETERS = Path("deploy.local.json")  # git ignores it
TEMPLATE = Path("template.yaml")
NO_CREDENTIALS = (
    "no valid AWS credentials: run `aws configure` or `aws sso login`, or name --profile"
)


class DeployError(Exception):
    """The deployment cannot go on. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Installation:
    """`session` is a boto3 session with a region."""

    session: Any
    stack: str
    parameters: dict[str, str]
    parameters_path: Path
    is_unattended: bool

    def client(self, service: str) -> Any:
        return self.session.client(service)

    def outputs(self, stack: str) -> dict[str, str]:
        """The outputs of a stack by name. Raises what boto3 raises."""
        [found] = self.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
        return {item["OutputKey"]: item["OutputValue"] for item in found.get("Outputs", [])}

    def sam_options(self) -> list[str]:
        """Options that sam needs to act on the same account and region."""
        profile = self.session.profile_name
        named = [] if profile == "default" else ["--profile", profile]
        return ["--region", self.session.region_name, *named]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", help="default: that of the profile or of AWS_REGION")
    parser.add_argument("--profile", help="of the AWS configuration")
    parser.add_argument("--stack-name", default="batchway")
    parser.add_argument(
        "--parameters", type=Path, default=PARAMETERS, metavar="FILE",
        help="the template's parameters, a JSON object; default: deploy.local.json",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="ask nothing")


def run_script(
    prog: str,
    about: str | None,
    act: Callable[[Installation], int],
    arguments: Sequence[str] | None,
) -> int:
    """Runs one of the scripts on the installation that its options name; returns the status."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser)
    given = parser.parse_args(arguments)
    try:
        one = installation_of(given)
        print(describe(one.session), flush=True)
        return act(one)
    except DeployError as exc:
        print(exc, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def installation_of(given: argparse.Namespace) -> Installation:
    """Raises DeployError."""
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.session.Session(profile_name=given.profile, region_name=given.region)
    except BotoCoreError as exc:
        raise DeployError(f"{NO_CREDENTIALS} ({exc})") from exc
    if session.region_name is None:
        raise DeployError("no region: name --region, set AWS_REGION, or run `aws configure`")
    parameters = read_parameters(given.parameters)
    return Installation(session, given.stack_name, parameters, given.parameters, given.yes)


def read_parameters(path: Path) -> dict[str, str]:
    """The parameters in a file; lists are joined by commas. Raises DeployError."""
    if not path.exists():
        if path == PARAMETERS:
            return {}
        raise DeployError(f"--parameters: no file {path}")
    try:
        found = json.loads(path.read_text())
    except ValueError as exc:
        raise DeployError(f"{path}: no JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise DeployError(f"{path}: must be a JSON object of parameters")
    return {
        str(name): ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in found.items()
    }


def write_parameters(path: Path, parameters: Mapping[str, str]) -> None:
    path.write_text(json.dumps(parameters, indent=2, sort_keys=True) + "\n")


def describe(session: Any) -> str:
    """Account, identity and region, as a sentence. Raises DeployError."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        identity = session.client("sts").get_caller_identity()
    except (BotoCoreError, ClientError) as exc:
        raise DeployError(f"{NO_CREDENTIALS} ({type(exc).__name__})") from exc
    return f"account {identity['Account']} as {identity['Arn']} in {session.region_name}"


_PARAMETER = re.compile(r"^  (\w+):\n((?:    .*\n|\n)+)", re.MULTILINE)
_DEFAULT = re.compile(r"^    Default: (.*)$", re.MULTILINE)


def declared_parameters(template: Path = TEMPLATE) -> dict[str, str | None]:
    """The names of the template's parameters, and each one's default or None."""
    section = template.read_text().partition("\nParameters:\n")[2]
    section = re.split(r"^\w", section, maxsplit=1, flags=re.MULTILINE)[0]
    return {
        name: default[1].strip().strip('"') if (default := _DEFAULT.search(body)) else None
        for name, body in _PARAMETER.findall(section)
    }
