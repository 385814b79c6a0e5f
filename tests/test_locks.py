"""Images install packages pinned by hash, in versions that pyproject.toml allows."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
EXTRAS = {
    "gateway": ("gateway", "callbacks", "aws", "tracing"),
    "worker": ("worker", "aws", "tracing"),
    "dev": ("gateway", "worker", "callbacks", "lambda", "aws", "tracing", "top", "dev"),
}
# The installation chooses its build, and so its hash.
UNLOCKED = {"torch"}


def entries(path: Path) -> list[tuple[Requirement, int]]:
    """Each requirement of a lock file, with the number of its hashes."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    found = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            wanted, *hashes = line.split("--hash=sha256:")
            found.append((Requirement(wanted.strip()), len(hashes)))
    return found


def pins(path: Path) -> dict[str, Requirement]:
    return {canonicalize_name(found.name): found for found, _ in entries(path)}


def version_of(pin: Requirement) -> str:
    [specifier] = pin.specifier
    assert specifier.operator == "==", pin
    return specifier.version


@pytest.mark.parametrize("name", [*EXTRAS, "build"])
def test_everything_is_pinned_by_hash(name: str) -> None:
    """One version each, none from a branch or a URL."""
    for pin, num_hashes in entries(LOCKS / f"{name}.txt"):
        assert num_hashes >= 1, pin
        assert pin.url is None
        assert version_of(pin)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_satisfies_the_projects_requirements(name: str) -> None:
    """If a requirement is added, run `scripts/lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in EXTRAS[name]:
        wanted += project["optional-dependencies"][extra]
    pinned = pins(LOCKS / f"{name}.txt")
    for requirement in map(Requirement, wanted):
        key = canonicalize_name(requirement.name)
        if key in UNLOCKED:
            assert key not in pinned
            continue
        assert key in pinned, f"{requirement} is not in locks/{name}.txt: run scripts/lock"
        assert requirement.specifier.contains(version_of(pinned[key])), requirement


def test_locks_agree_about_versions() -> None:
    """Of the packages that Lambda's artifact, the gateway's image and the worker's share. The
    gateway has no model library."""
    gateway, worker = pins(LOCKS / "gateway.txt"), pins(LOCKS / "worker.txt")
    artifact = pins(ROOT / "gateway" / "aws" / "requirements.txt")
    for others in (worker, artifact):
        for key in set(gateway) & set(others):
            assert version_of(gateway[key]) == version_of(others[key])
    assert set(artifact) - set(gateway) == {"mangum"}
    assert not {"numpy", "safetensors", "transformers"} & set(gateway)


@pytest.mark.parametrize("image", ["gateway", "worker"])
def test_images_install_by_hash(image: str) -> None:
    """Except torch, vLLM in its own environment, and the project's wheel. The locks are copied or
    mounted."""
    text = (ROOT / f"Dockerfile.{image}").read_text().replace("-r /locks/", "-r locks/")
    installs = re.findall(r"pip install ([^\\&\n]+)", text)
    allowed = {
        f"--require-hashes -r locks/{image}.txt",
        f"--no-deps --require-hashes -r locks/{image}.txt",  # torch is there
        "--require-hashes -r locks/build.txt",
        "--no-deps /dist/*.whl",
        '"$TORCH"',
        '"$VLLM"',
        "--no-deps --no-index /wheels/*.whl",
    }
    assert {line.strip() for line in installs} <= allowed
    assert f"--require-hashes -r locks/{image}.txt" in text


def test_an_audit_without_an_answer_has_its_own_exit_status() -> None:
    """It says what was not audited."""
    nowhere = "http://127.0.0.1:1"
    environ = os.environ | dict.fromkeys(("https_proxy", "HTTPS_PROXY"), nowhere)
    environ |= {"no_proxy": "", "NO_PROXY": ""}
    audit = (ROOT / "scripts" / "audit").read_text()
    # The tools of the Python that runs the tests, wherever that is.
    for old, new in (
        ("scripts/setup || exit 2\n", ""),
        (".venv/bin/", f"{Path(sys.executable).parent}/"),
        ('"$(dirname "${BASH_SOURCE[0]}")/.."', str(ROOT)),
    ):
        assert old in audit
        audit = audit.replace(old, new)
    done = subprocess.run(
        ["bash", "-c", audit], env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert "not audited: locks/build.txt and all later files" in done.stderr
