"""Habits of the repository: hooks, hosted CI, releases. Scripts run in small repositories of their
own, where other programs are replaced by ones that only print their names; nothing is installed.
"""

import os
import re
import subprocess
import sys
import tomllib
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.conftest import leave_a_sample

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["serve", "test", "check", "campaigns", "versions", "images"]
HEADINGS = [
    "== scripts/serve in an empty clone; the wheel outside of one",
    "== scripts/test in an empty clone",
    "== checks, the site of the documents, and clients whose environments are made in seconds",
    "== whole processes and short campaigns, with real tokenizers, chat templates and weights",
    "== Debian's Redis, the oldest that is supported, while vLLM is fetched",
    "== vLLM, the newest release that is supported",
    "== all passed",
]
CALLED = (
    "setup",
    "setup-sam",
    "chromium",
    "docs",
    "test",
    "check",
    "clients",
    "real-parts",
    "campaigns",
    "setup-vllm",
    "vllm-contract",
)
PROJECT = 'name = "batchway"\nversion = "0.1.0"\nother = 1\n'
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n- New.\n\n## [0.1.0] - 2026-01-01\n\n- All.\n"
# Makes environments whose Python makes the files of a release, and installs nothing.
FAKE_PYTHON = f"""#!/usr/bin/env bash
set -eu
case "$*" in
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m hatchling"*) mkdir -p "${{@: -1}}"; echo sdist >"${{@: -1}}/batchway.tar.gz" ;;
"-m pip wheel"*) echo wheel >"$(dirname "${{@: -1}}")/batchway.whl" ;;
"-m pip install"*) ;;
"-m tests."* | "-I scripts/"*) echo "ran $*" ;;
*) exec "{sys.executable}" "$@" ;;
esac
"""


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Repository:
    """A small repository, and programs that replace those of this machine."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.tree, self.programs = folder / "tree", folder / "programs"
        for name, text in files.items():
            write(self.tree / name, text)
        write(self.programs / "python3", FAKE_PYTHON)
        write(self.programs / "docker", '#!/bin/sh\n[ "$1" = info ] || echo "ran docker $*"\n')
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "A name")
        self.git("config", "user.email", "name@example.org")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=All")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program in it, without settings of git from elsewhere."""
        environ = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
        environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        environ["PATH"] = os.pathsep.join([str(self.programs), os.environ["PATH"]])
        return subprocess.run(command, cwd=self.tree, env=environ, capture_output=True, text=True)

    def git(self, *arguments: str) -> str:
        done = self.run("git", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def ci(tmp_path: Path) -> Repository:
    """With the real .ci/run."""
    files = {f"scripts/{name}": f'#!/bin/sh\necho "ran {name} $*"\n' for name in CALLED}
    files["scripts/with-redis"] = '#!/bin/sh\nshift; exec "$@"\n'
    files["scripts/test"] += "mkdir -p .venv/bin; cd .venv/bin; touch promtool aws-lambda-rie\n"
    files[".ci/run"] = (ROOT / ".ci" / "run").read_text()
    return Repository(tmp_path, files)


@pytest.fixture
def project(tmp_path: Path) -> Repository:
    """With the real scripts/release, and a change that is not released."""
    scripts = ("scripts/release", "scripts/version.py")
    files = {name: (ROOT / name).read_text() for name in scripts}
    texts = {"pyproject.toml": PROJECT, "CHANGELOG.md": CHANGELOG, ".gitignore": "dist/\n"}
    return Repository(tmp_path, files | texts)


def test_the_hooks_before_a_commit_are_the_commands_of_the_check() -> None:
    """In the same order, with the tools of .venv, whose versions are named elsewhere."""
    [source] = load(".pre-commit-config.yaml")["repos"]
    check = (ROOT / "scripts" / "check").read_text()
    commands = re.findall(r"^\.venv/bin/.*$", check, re.MULTILINE)

    assert source["repo"] == "local"
    assert "rev" not in source
    assert [hook["entry"] for hook in source["hooks"]] == commands
    for hook in source["hooks"]:
        assert hook["language"] == "system"
        assert hook["pass_filenames"] is False  # the commands name what they check


def test_every_package_says_that_it_has_types() -> None:
    """`tests.first_run wheel` and scripts/release look for these files in the installed wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    for package in settings["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert (ROOT / package / "py.typed").read_bytes() == b"", package


def test_hosted_ci_runs_every_part_once() -> None:
    """In a job each, of which none ends the others."""
    [job] = load(".github/workflows/ci.yml")["jobs"].values()
    known = re.findall(r"^([\w-]+)\)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)

    assert known == PARTS
    assert job["strategy"]["matrix"] == {"part": PARTS}
    assert job["strategy"]["fail-fast"] is False
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run ${{ matrix.part }}"]


def test_hosted_ci_is_limited() -> None:
    """In rights, in time, and in runs of one branch."""
    workflow = load(".github/workflows/ci.yml")

    assert workflow["permissions"] == {"contents": "read"}
    assert "github.ref" in workflow["concurrency"]["group"]
    assert all(0 < job["timeout-minutes"] <= 120 for job in workflow["jobs"].values())


def test_hosted_ci_takes_actions_by_digest() -> None:
    """A tag can be moved. A comment names the version."""
    files = [path for path in (ROOT / ".github").rglob("*") if path.suffix in {".yml", ".yaml"}]
    uses = [line for path in files for line in re.findall(r"\buses:.*", path.read_text())]

    assert uses
    for line in uses:
        assert re.fullmatch(r"uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_ci_without_a_part_runs_all_in_order(ci: Repository) -> None:
    """It prints each heading once."""
    done = ci.run(".ci/run")

    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("==")] == HEADINGS
    assert done.stderr == ""
    assert ci.git("status", "--porcelain") == ""


def test_all_parts_of_ci_together_run_what_it_runs(ci: Repository) -> None:
    """Nothing is left out where each part has a machine of its own."""
    whole = ci.run(".ci/run").stdout.splitlines()
    parts = []
    for part in PARTS:
        done = ci.run(".ci/run", part)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == HEADINGS[-1]
        parts += done.stdout.splitlines()[:-1]

    # Programs in the background print at any time.
    assert sorted(parts) == sorted(whole[:-1])
    assert {line.split()[1] for line in parts if line.startswith("ran ")} > {*CALLED, "docker"}


def test_ci_names_a_part_that_it_does_not_know(ci: Repository) -> None:
    """With the exit status of a wrong option."""
    done = ci.run(".ci/run", "tests")

    assert done.returncode == 2
    assert done.stderr == ".ci/run: no part is called tests\n"
    assert "all passed" not in done.stdout


def test_a_release_is_one_commit_with_a_tag(project: Repository) -> None:
    """Version and changelog are changed in it, and its files are in dist."""
    done = project.run("scripts/release", "0.2.0")

    assert done.returncode == 0, done.stderr
    assert project.git("log", "--format=%s by %an") == "Release 0.2.0 by A name\nAll by A name"
    assert project.git("rev-parse", "v0.2.0^{commit}") == project.git("rev-parse", "HEAD")
    assert project.git("cat-file", "-t", "v0.2.0") == "tag"
    assert project.git("status", "--porcelain") == ""
    assert (project.tree / "pyproject.toml").read_text() == PROJECT.replace("0.1.0", "0.2.0")
    changelog = (project.tree / "CHANGELOG.md").read_text()
    heading = re.compile(r"\n## \[0\.2\.0\] - \d{4}-\d\d-\d\d\n(?=\n- New\.\n)")
    assert heading.sub("", changelog) == CHANGELOG
    assert heading.search(changelog)
    made = sorted(path.name for path in (project.tree / "dist").iterdir())
    assert made == ["batchway.tar.gz", "batchway.whl"]


def test_a_dry_run_of_a_release_leaves_the_tree(project: Repository) -> None:
    """It has the same steps, and keeps nothing."""
    before = project.git("rev-parse", "HEAD")

    done = project.run("scripts/release", "--dry-run", "0.2.0")

    assert done.returncode == 0, done.stderr
    assert "== Release 0.2.0, tagged v0.2.0" in done.stdout
    assert "ran -I scripts/installation.py" in done.stdout
    assert done.stdout.endswith("== dry run: nothing is kept\n")
    assert project.git("rev-parse", "HEAD") == before
    assert project.git("status", "--porcelain", "--ignored") == ""
    assert project.git("tag") == ""


def test_a_release_needs_a_clean_tree(project: Repository) -> None:
    """Otherwise it is not clear what is in it."""
    (project.tree / "pyproject.toml").write_text(PROJECT + "more = 2\n")

    done = project.run("scripts/release", "0.2.0")

    assert done.returncode == 1
    assert done.stderr == "scripts/release: commit all changes first\n"
    assert project.git("tag") == ""


@pytest.mark.parametrize(
    ("version", "changelog", "reason"),
    [
        ("v0.2", CHANGELOG, "v0.2 is not a version such as 0.2.0 or 0.2.0rc1"),
        ("0.1.0", CHANGELOG, "CHANGELOG.md has a part for 0.1.0 already"),
        ("0.2.0", CHANGELOG.replace("- New.\n", ""), "CHANGELOG.md names no unreleased change"),
        ("0.2.0", "# Changelog\n", "CHANGELOG.md has no part ## [Unreleased]"),
    ],
)
def test_what_cannot_be_released_changes_no_file(
    tmp_path: Path, version: str, changelog: str, reason: str
) -> None:
    """The message says why."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "CHANGELOG.md").write_text(changelog)

    program = str(ROOT / "scripts" / "version.py")
    command = [sys.executable, program, version, "2026-11-26"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stderr == f"scripts/release: {reason}\n"
    assert (tmp_path / "pyproject.toml").read_text() == PROJECT
    assert (tmp_path / "CHANGELOG.md").read_text() == changelog


class Case:
    """A case of a parametrized test, as far as the choice of some looks at it."""

    def __init__(self, mark: str, params: dict[str, Any]) -> None:
        self.nodeid = f"tests/test_it.py::test_it[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.marks = [getattr(pytest.mark, mark).mark]

    def iter_markers(self) -> list[pytest.Mark]:
        return self.marks

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks.append(marker.mark)


@pytest.mark.parametrize(("mark", "size", "num_left"), [("each_value", 1, 4), ("each_pair", 2, 12)])
def test_the_cases_left_to_ci_have_each_value_or_pair(mark: str, size: int, num_left: int) -> None:
    """As few as there can be of four, three and two values; the others are long campaigns."""
    values = {"a": range(4), "b": "xyz", "c": (None, 0.5)}
    products = [dict(zip(values, case, strict=True)) for case in product(*values.values())]
    cases: Any = [Case(mark, params) for params in products]
    leave_a_sample(cases)
    left = [case for case in cases if case.get_closest_marker("long") is None]
    assert len(left) == num_left
    assert all(case.get_closest_marker("campaign") for case in cases if case not in left)

    def combined(some: Any) -> set[Any]:
        return {part for case in some for part in combinations(case.callspec.params.items(), size)}

    assert combined(left) == combined(cases)


def test_no_text_file_is_read_in_the_encoding_of_the_locale() -> None:
    """Which may be ASCII."""
    packages = ["gateway", "workers", "contract", "infra", "batchway_client", "bench", "scripts"]
    check = ["-m", "ruff", "check", "--preview", "--select=PLW1514", *packages]
    done = subprocess.run([sys.executable, *check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
