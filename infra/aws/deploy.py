"""Deploys to AWS, and upgrades. Asks for what only you know, and keeps the answers.

    scripts/deploy [--yes] [--region R] [--profile P] [--stack-name NAME] [--parameters FILE]

The steps: check the account, build the images that no parameter names (by CodeBuild), build and
deploy the stack, load the function library, and send one job through it, so that an image that
cannot start is noticed now.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.aws import preflight
from infra.aws.artifacts import IMAGES, build_images, deploy_artifacts
from infra.aws.installation import (
    DeployError,
    Installation,
    declared_parameters,
    run_script,
    write_parameters,
)
from infra.aws.trial import Trial, asker, failures_of

BUILT = Path(".aws-sam/build")
_SAM = Path(".venv-sam/bin/sam")


def ask_for_missing(one: Installation, ask: Callable[[str], str] = input) -> None:
    """Asks for required parameters, and keeps the answers in the file. Raises DeployError."""
    required = [name for name, default in declared_parameters().items() if default is None]
    missing = [name for name in required if name not in one.parameters and name not in IMAGES]
    if missing and one.is_unattended:
        raise DeployError(f"{one.parameters_path}: {', '.join(missing)} missing")
    for name in missing:
        one.parameters[name] = ask(f"{name}: ").strip()
    if missing:
        write_parameters(one.parameters_path, one.parameters)


def check_names(parameters: Mapping[str, str]) -> None:
    """Raises DeployError for a name that the template does not have."""
    declared = declared_parameters()
    if unknown := [name for name in parameters if name not in declared]:
        raise DeployError(f"no parameter {unknown[0]!r} in template.yaml")


def release(folder: Path, parameters: Mapping[str, str]) -> str:
    """SHA-256 of all that makes the functions: files, and parameters."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    for name, value in sorted(parameters.items()):
        digest.update(f"{name}={value}\0".encode())
    return digest.hexdigest()


def sam(one: Installation, *arguments: str) -> None:
    """Runs a sam command. Raises DeployError."""
    environ = {**os.environ, "SAM_CLI_TELEMETRY": "0"}
    command = [str(_SAM), *arguments, *one.sam_options()]
    if subprocess.run(command, env=environ).returncode:  # noqa: S603
        raise DeployError(f"sam {arguments[0]} failed")


def deploy_stack(one: Installation, parameters: Mapping[str, str], bucket: str) -> None:
    """Raises DeployError."""
    overrides = [f"ParameterKey={k},ParameterValue={v}" for k, v in parameters.items()]
    sam(
        one, "deploy", "--stack-name", one.stack, "--capabilities", "CAPABILITY_IAM",
        "--s3-bucket", bucket, "--no-resolve-s3", "--no-fail-on-empty-changeset",
        "--no-confirm-changeset" if one.is_unattended else "--confirm-changeset",
        "--tags", f"batchway={one.stack}", "--parameter-overrides", *overrides,
    )  # fmt: skip


def load_library(client: Any, function: str) -> None:
    """Raises DeployError if the function fails, and what boto3 raises."""
    answer = client.invoke(FunctionName=function)
    if "FunctionError" in answer:
        raise DeployError(f"{function} failed: see its log")


def try_worker(one: Installation, found: Mapping[str, str]) -> None:
    """Sends one job through the new stack. Raises DeployError, and what boto3 raises."""
    secret = one.client("secretsmanager").get_secret_value(SecretId=found["ApiKeySecretArn"])
    [key] = json.loads(secret["SecretString"]).values()
    given = {**declared_parameters(), **one.parameters}
    failures = failures_of(one.client("ecs"), found["ClusterName"], f"{one.stack}-worker")
    lane = str(given["Lanes"]).partition(",")[0]
    Trial(asker(found["Url"], key), str(given["ServedModelName"]), lane, failures).run()


def next_steps(found: Mapping[str, str]) -> str:
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


def deploy(one: Installation) -> int:
    """Raises DeployError, and what boto3 raises."""
    check_names(one.parameters)
    ask_for_missing(one)
    artifacts = deploy_artifacts(one)
    own = [name for name in IMAGES if name not in one.parameters]
    one.parameters.update(build_images(one, artifacts, own))
    if not preflight.report(one):
        raise DeployError("not deployed")
    sam(one, "validate", "--lint")
    sam(one, "build")
    parameters = {**one.parameters, "Release": release(BUILT, one.parameters)}
    deploy_stack(one, parameters, artifacts["Bucket"])
    found = one.outputs(one.stack)
    load_library(one.client("lambda"), found["HousekeeperFunctionName"])
    if one.parameters.get("CapacityKind") != "own-machines":
        try_worker(one, found)
    print(next_steps(found))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("scripts/deploy", __doc__, deploy, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
