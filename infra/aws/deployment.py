"""Steps of scripts/deploy: prints the AWS account before anything is built; after the deployment
loads the function library, and prints the URL and a call to try. Exit status 0 or 1.

    python -m infra.aws.deployment [CONFIG]      without a sam configuration: the account

Needs only boto3: it runs in the virtual environment of the sam command line.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

_DEFAULT_STACK = "batchway"
_HELP = "no valid AWS credentials: run `aws configure` or `aws sso login`, or set AWS_PROFILE"


def describe(session: Any) -> str:
    """Account, identity and region, as a sentence. Raises what boto3 raises, LookupError."""
    if session.region_name is None:
        raise LookupError("no region: set AWS_REGION, or run `aws configure`")
    identity = session.client("sts").get_caller_identity()
    return f"account {identity['Account']} as {identity['Arn']} in {session.region_name}"


class NotDeployed(Exception):
    """The stack or a part of it does not respond as it should."""


def stack_name(config: Path) -> str:
    """The stack name in a sam configuration file."""
    default = tomllib.loads(config.read_text()).get("default", {})
    for section in ("deploy", "global"):
        name = default.get(section, {}).get("parameters", {}).get("stack_name")
        if name:
            return str(name)
    return _DEFAULT_STACK


def outputs(client: Any, stack: str) -> dict[str, str]:
    """The outputs of a stack by name. Raises what boto3 raises."""
    [found] = client.describe_stacks(StackName=stack)["Stacks"]
    return {item["OutputKey"]: item["OutputValue"] for item in found.get("Outputs", [])}


def load_library(client: Any, function: str) -> None:
    """Raises NotDeployed if the function fails, and what boto3 raises."""
    answer = client.invoke(FunctionName=function)
    if "FunctionError" in answer:
        raise NotDeployed(f"{function} failed: see its log")


def next_steps(found: dict[str, str]) -> str:
    """Returns the next steps. The printed command reads the key from AWS; the text does not
    contain it."""
    url, secret = found["Url"], found["ApiKeySecretArn"]
    return f"""
{url}

  key=$(aws secretsmanager get-secret-value --secret-id {secret} \\
    --query SecretString --output text | cut -d '"' -f 4)
  curl -N {url}/v1/models -H "authorization: Bearer $key"

A pool without workers takes a few minutes until its first answer: queue a job with POST /v1/jobs,
or poll /readyz until it reports a worker."""


def main(arguments: list[str]) -> int:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    if not arguments:
        try:
            print(describe(boto3.session.Session()))
        except LookupError as exc:
            print(exc, file=sys.stderr)
            return 1
        except (BotoCoreError, ClientError) as exc:
            print(f"{_HELP} ({type(exc).__name__})", file=sys.stderr)
            return 1
        return 0
    found = outputs(boto3.client("cloudformation"), stack_name(Path(arguments[0])))
    try:
        load_library(boto3.client("lambda"), found["HousekeeperFunctionName"])
    except NotDeployed as exc:
        print(exc, file=sys.stderr)
        return 1
    print(next_steps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
