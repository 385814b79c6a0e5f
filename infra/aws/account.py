"""Prints the AWS account of a deployment before anything is built. Exit status 0 or 1.

Needs only boto3: it runs in the virtual environment of the sam command line.
"""

import sys
from typing import Any

HELP = "no valid AWS credentials: run `aws configure` or `aws sso login`, or set AWS_PROFILE"


def describe(session: Any) -> str:
    """Account, identity and region, as a sentence. Raises what boto3 raises, LookupError."""
    if session.region_name is None:
        raise LookupError("no region: set AWS_REGION, or run `aws configure`")
    identity = session.client("sts").get_caller_identity()
    return f"account {identity['Account']} as {identity['Arn']} in {session.region_name}"


def main() -> int:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        print(describe(boto3.session.Session()))
    except LookupError as exc:
        print(exc, file=sys.stderr)
        return 1
    except (BotoCoreError, ClientError) as exc:
        print(f"{HELP} ({type(exc).__name__})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
