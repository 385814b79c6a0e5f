"""Builds the two images by CodeBuild, of the same files as the functions, and notes their URIs.

    scripts/images [--region R] [--profile P] [--stack-name NAME]

The stack NAME-artifacts (artifacts.yaml) holds a bucket for these files, a registry, and the
project that builds an image on a machine of its kind; Docker is not needed. An image that exists
is not built again. First comes what scripts/preflight does.
"""

import tempfile
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

from infra.aws import preflight
from infra.aws.installation import Installation, run_script
from infra.aws.parameters import IMAGES, DeployError, git, path, sources_id, tags, write

TEMPLATE = Path(__file__).with_name("artifacts.yaml")
POLL_S = 15.0
_ARM = {
    "environmentTypeOverride": "ARM_CONTAINER",
    "imageOverride": "aws/codebuild/amazonlinux-aarch64-standard:3.0",
    "computeTypeOverride": "BUILD_GENERAL1_SMALL",
}


def build_images(one: Installation) -> int:
    """Builds what no parameter names, and what was built here of other files. Raises DeployError,
    and what boto3 raises."""
    if preflight.report(one):
        raise DeployError("nothing was built")
    artifacts = f"{one.stack}-artifacts"
    own = {name: one.parameters.get(name, f"/{artifacts}:") for name in IMAGES}
    wanted = {n: tag for n, tag in tags(one.parameters).items() if f"/{artifacts}:" in own[n]}
    if not wanted:
        return 0
    one.sam(
        "deploy", "--config-env=none", "--no-fail-on-empty-changeset", "--capabilities",
        "CAPABILITY_IAM", "--stack-name", artifacts, "--template-file", str(TEMPLATE),
    )  # fmt: skip
    outputs = (one.described(artifacts) or {})["Outputs"]
    found = {output["OutputKey"]: output["OutputValue"] for output in outputs}
    names = [{"imageTag": tag} for tag in wanted.values()]
    answer = one.client("ecr").batch_get_image(repositoryName=artifacts, imageIds=names)
    present = {image["imageId"]["imageTag"] for image in answer["images"]}
    run_builds(one, found["Bucket"], artifacts, set(wanted.values()) - present)
    uris = {name: f"{found['Registry']}:{tag}" for name, tag in wanted.items()}
    write(path(), one.parameters | uris)
    return 0


def run_builds(one: Installation, bucket: str, project: str, wanted: Set[str]) -> None:
    """Builds images of the present files, all at once. Raises DeployError, what boto3 raises."""
    if not wanted:
        return
    source, client = f"source-{sources_id()}.zip", one.client("codebuild")
    with tempfile.TemporaryDirectory() as folder:
        git("archive", "--format=zip", f"--output={folder}/{source}", sources_id())
        one.client("s3").upload_file(f"{folder}/{source}", bucket, source)
    ids = [_start(client, project, f"{bucket}/{source}", tag) for tag in wanted]
    while ids:
        builds = client.batch_get_builds(ids=ids)["builds"]
        for build in builds:
            print(f"{build['id']}: {build.get('currentPhase', 'QUEUED')}", flush=True)
            if build["buildStatus"] not in ("IN_PROGRESS", "SUCCEEDED"):
                link = build.get("logs", {}).get("deepLink", "CodeBuild's console")
                raise DeployError(f"{build['id']} failed: see {link}")
        ids = [build["id"] for build in builds if build["buildStatus"] == "IN_PROGRESS"]
        time.sleep(POLL_S if ids else 0)


def _start(client: Any, project: str, source: str, tag: str) -> str:
    is_services = tag.startswith("services-")
    variables = {"TAG": tag, "TARGET": "" if is_services else tag.partition("-")[0]}
    variables["DOCKERFILE"] = f"Dockerfile.{'gateway' if is_services else 'worker'}"
    started = client.start_build(
        projectName=project,
        sourceTypeOverride="S3",
        sourceLocationOverride=source,
        environmentVariablesOverride=[{"name": n, "value": v} for n, v in variables.items()],
        **(_ARM if is_services else {}),
    )
    return str(started["build"]["id"])


if __name__ == "__main__":
    raise SystemExit(run_script(build_images))
