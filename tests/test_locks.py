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
# The installation chooses its build, and so its hash; the worker's image has a lock of its own.
UNLOCKED = {"torch"}
# Of all that an image installs. `pip` without `--only-binary` may build a package, for which it
# installs others without a hash.
BY_HASH = re.compile(
    r"pip install (--no-deps )?--only-binary :all: --require-hashes -r /?locks/\w+\.txt"
)
OWN_WHEEL = re.compile(
    r"pip install --no-deps --no-index /\w+/\*\.whl"
    r"|pip wheel --no-deps --no-build-isolation --\w+-dir /\w+ \."
)


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


def commands(dockerfile: Path) -> list[str]:
    """What its layers run, each command of a shell by itself."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.M).replace("\\\n", " ")
    layers = re.findall(r"^RUN (.*)", text, re.M)
    return [" ".join(part.split()) for layer in layers for part in re.split("&&|;|[|]", layer)]


def version_of(pin: Requirement) -> str:
    [specifier] = pin.specifier
    assert specifier.operator == "==", pin
    return specifier.version


@pytest.mark.parametrize("name", sorted(path.stem for path in LOCKS.iterdir()))
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
    torch = pins(LOCKS / "torch.txt")
    for key in set(torch) & set(worker):
        assert version_of(torch[key]) == version_of(worker[key])
    artifact = pins(ROOT / "gateway" / "aws" / "requirements.txt")
    for others in (worker, artifact):
        for key in set(gateway) & set(others):
            assert version_of(gateway[key]) == version_of(others[key])
    assert set(artifact) - set(gateway) == {"mangum"}
    assert not {"numpy", "safetensors", "transformers"} & set(gateway)


@pytest.mark.parametrize("image", sorted(path.name for path in ROOT.glob("Dockerfile*")))
def test_images_install_by_hash(image: str) -> None:
    """Everything but the project's wheel, which is built from these files. The locks are copied or
    mounted, and a base is named by its digest."""
    text = (ROOT / image).read_text()
    uses = [
        each for each in commands(ROOT / image) if re.search(r"\b(pip3?|uv|npm|curl|wget)\b", each)
    ]
    installs = [each for each in uses if not each.endswith("pip check")]
    for each in installs:
        command = re.sub(r"^(--mount=\S+ )*(/opt/[\w.-]+/bin/)?", "", each)
        assert BY_HASH.fullmatch(command) or OWN_WHEEL.fullmatch(command), each
    assert sum("--require-hashes" in each for each in installs) >= 2
    stages = re.findall(r" AS (\w+)$", text, re.M)
    for base in re.findall(r"^FROM (\S+)", text, re.M):
        assert base in stages or re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", base)
    assert not re.search(r"^ADD\b", text, re.M)


def test_the_functions_artifact_is_installed_by_hash() -> None:
    """The pins of its list, which scripts/lock gives their hashes."""
    lock = pins(LOCKS / "lambda.txt")
    listed = pins(ROOT / "gateway" / "aws" / "requirements.txt")
    assert {name: version_of(pin) for name, pin in lock.items()} == {
        name: version_of(pin) for name, pin in listed.items()
    }
    script = (ROOT / "scripts" / "build-gateway").read_text()
    assert script.count('pip[@]}" install') == script.count("--require-hashes") == 1
    assert "--require-hashes --requirement locks/lambda.txt" in script


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
