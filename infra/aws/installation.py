"""One installation on AWS: the options that name it, its stacks, and AWS's errors in a sentence.

Needs nothing but boto3 and sam: it runs in sam's virtual environment.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infra.aws.parameters import SAM_SETTINGS, DeployError, own_values

_REMEDIES = (
    ("Credential|Profile|SSO|Token|InvalidClient|UnrecognizedClient|InvalidAccessKey|AuthFailure"
     "|Signature|RequestExpired|TimeTooSkewed",
     "run `aws configure` or `aws sso login`, or name --profile; the clock must be right"),
    ("Region|OptIn|NotSignedUp", "name a --region that this account may use"),
    ("Denied|Unauthorized|Authoriz|Forbidden|^403", "let a policy of this identity allow it"),
    ("Limit|Quota|TooMany|Throttl|SlowDown|Insufficient",
     "wait a minute, or ask for more in the console under Service Quotas"),
    ("Connect|Endpoint|Timeout|SSL|Proxy|HTTP|Internal|Unavailable|^5",
     "check the network and --region, and try again"),
    ("NotFound|NoSuch|NotExist|^404", "check the name and --region"),
)  # fmt: skip
"""What codes and classes of boto's errors contain, and what to do then."""


@dataclass(frozen=True, slots=True)
class Installation:
    """`session` is a boto3 session with a region."""

    session: Any
    stack: str
    parameters: dict[str, str]
    is_unattended: bool = False

    def client(self, service: str) -> Any:
        return self.session.client(service)

    def described(self, stack: str) -> dict[str, Any] | None:
        """A stack as CloudFormation describes it, or None. Raises what boto3 raises."""
        client = self.client("cloudformation")
        try:
            return dict(client.describe_stacks(StackName=stack)["Stacks"][0])
        except client.exceptions.ClientError as exc:
            if "does not exist" not in str(exc):
                raise
            return None

    def sam(self, *arguments: str) -> None:
        """Runs a sam command on the same account and region. Raises DeployError."""
        where = ["--region", self.session.region_name]
        if self.session.profile_name != "default":
            where += ["--profile", self.session.profile_name]
        environ = {**os.environ, "SAM_CLI_TELEMETRY": "0"}
        if subprocess.run([".venv-sam/bin/sam", *arguments, *where], env=environ).returncode:  # noqa: S603
            raise DeployError(f"sam {arguments[0]} failed")


def explained(exc: Exception) -> str:
    """An error of boto as one sentence with what to do."""
    kind = code_of(exc) or type(exc).__name__
    said = " ".join(str(exc).split()).rstrip(".:") or kind
    remedies = (remedy for pattern, remedy in _REMEDIES if re.search(pattern, kind))
    return f"{said}: {next(remedies, 'correct it, and run this again')}."


def code_of(exc: Exception) -> str:
    """What AWS calls its answer; nothing where it did not answer."""
    answer = getattr(exc, "response", None)
    return str(answer["Error"].get("Code", "")) if isinstance(answer, dict) else ""


def run_script(act: Callable[[Installation], int], arguments: Sequence[str] | None = None) -> int:
    """Runs one of the scripts on the installation that its options name; returns the status."""
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, NoRegionError

    try:
        given = _options(sys.modules[act.__module__].__doc__).parse_args(arguments)
        session = boto3.session.Session(profile_name=given.profile, region_name=given.region)
        if session.region_name is None:
            raise NoRegionError
        identity = session.client("sts").get_caller_identity()
        print(f"{identity['Arn']} in {session.region_name}", flush=True)
        return act(Installation(session, given.stack_name, own_values(), given.yes))
    except (DeployError, OSError) as exc:
        print(exc, file=sys.stderr)
    except (Boto3Error, BotoCoreError, ClientError) as exc:
        print(explained(exc), file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


def _options(about: str | None) -> argparse.ArgumentParser:
    """Their defaults are what `sam deploy --guided` saved."""
    saved = tomllib.loads(SAM_SETTINGS.read_text())["default"]
    known = saved["global"]["parameters"] | saved["deploy"]["parameters"]
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--region", default=known.get("region"), help="default: the profile's")
    parser.add_argument("--profile", default=known.get("profile"), help="of AWS's configuration")
    parser.add_argument("--stack-name", default=known["stack_name"])
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    return parser
