"""After a deployment: loads the function library, then prints the URL and a call to try.

Needs nothing but boto3: it runs in the virtual environment of the sam command line.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

DEFAULT_STACK = "batchway"


class NotDeployed(Exception):
    """The stack or a part of it does not respond as it should."""


def stack_name(config: Path) -> str:
    """The stack name in a sam configuration file."""
    default = tomllib.loads(config.read_text()).get("default", {})
    for section in ("deploy", "global"):
        name = default.get(section, {}).get("parameters", {}).get("stack_name")
        if name:
            return str(name)
    return DEFAULT_STACK


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


def main() -> int:
    import boto3

    stack = stack_name(Path(sys.argv[1]))
    found = outputs(boto3.client("cloudformation"), stack)
    try:
        load_library(boto3.client("lambda"), found["HousekeeperFunctionName"])
    except NotDeployed as exc:
        print(exc, file=sys.stderr)
        return 1
    print(next_steps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
