"""What a deployment needs before it: a bucket for functions, and the two images.

The stack NAME-artifacts (artifacts.yaml) holds the bucket, the registries, and the CodeBuild
projects that build each image on a machine of its own kind; Docker is not needed.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.aws.installation import DeployError, Installation

TEMPLATE = Path(__file__).with_name("artifacts.yaml")
IMAGES = {"WorkerImageUri": "Worker", "ServicesImageUri": "Services"}
"""The template's parameters, and the names of registry and project in images.yaml."""
_POLL_S = 15.0


def build_images(
    one: Installation, found: Mapping[str, str], parameters: Sequence[str]
) -> dict[str, str]:
    """Builds these images of the last commit, unless they exist; returns their URIs. `found` are
    the outputs of artifacts.yaml. Raises DeployError, and what boto3 raises."""
    if not parameters:
        return {}
    tag = _git("rev-parse", "--short=12", "HEAD")
    uris = {name: f"{found[IMAGES[name] + 'Registry']}:{tag}" for name in parameters}
    ecr = one.client("ecr")
    missing = [name for name in parameters if not _exists(ecr, uris[name])]
    if missing:
        source = f"source-{tag}.zip"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / source
            _git("archive", "--format=zip", f"--output={path}", "HEAD")
            one.client("s3").upload_file(str(path), found["Bucket"], source)
        projects = [found[IMAGES[name] + "Project"] for name in missing]
        run_builds(one.client("codebuild"), projects, f"{found['Bucket']}/{source}", tag)
    return uris


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)  # noqa: S603, S607
    return ran.stdout.strip()


def deploy_artifacts(one: Installation) -> dict[str, str]:
    """Deploys artifacts.yaml; returns its outputs. Raises what boto3 raises."""
    client, name = one.client("cloudformation"), f"{one.stack}-artifacts"
    made = {
        "StackName": name,
        "TemplateBody": TEMPLATE.read_text(),
        "Capabilities": ["CAPABILITY_IAM"],
    }
    try:
        client.describe_stacks(StackName=name)
    except client.exceptions.ClientError:
        client.create_stack(**made)
        client.get_waiter("stack_create_complete").wait(StackName=name)
    else:
        try:
            client.update_stack(**made)
            client.get_waiter("stack_update_complete").wait(StackName=name)
        except client.exceptions.ClientError as exc:
            if "No updates are to be performed" not in str(exc):
                raise
    return one.outputs(name)


def _exists(ecr: Any, uri: str) -> bool:
    repository, _, tag = uri.partition("/")[2].rpartition(":")
    try:
        ecr.describe_images(repositoryName=repository, imageIds=[{"imageTag": tag}])
    except ecr.exceptions.ImageNotFoundException:
        return False
    return True


def run_builds(
    client: Any,
    projects: Sequence[str],
    source: str,
    tag: str,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Runs all builds at once and waits for them. Raises DeployError."""
    ids = [
        client.start_build(
            projectName=project,
            sourceTypeOverride="S3",
            sourceLocationOverride=source,
            environmentVariablesOverride=[{"name": "TAG", "value": tag}],
        )["build"]["id"]
        for project in projects
    ]
    while True:
        builds = client.batch_get_builds(ids=ids)["builds"]
        for build in builds:
            print(f"{build['projectName']}: {build.get('currentPhase', 'QUEUED')}", flush=True)
        failed = [b for b in builds if b["buildStatus"] not in ("IN_PROGRESS", "SUCCEEDED")]
        if failed:
            link = failed[0].get("logs", {}).get("deepLink", "CodeBuild's console")
            raise DeployError(f"{failed[0]['projectName']} failed: see {link}")
        if all(build["buildStatus"] == "SUCCEEDED" for build in builds):
            return
        sleep(_POLL_S)
