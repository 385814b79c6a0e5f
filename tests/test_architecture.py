"""The structure of the code: imports, and the limits of files, functions and options."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.options_page import fields, metrics, options

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("batchway_client", "contract", "gateway", "workers", "infra", "bench")
MAX_SCRIPT_LINES = 30

IMPORT_WITHOUT = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
for module in {modules!r}:
    importlib.import_module(module)
"""

# Tests of models, and of what measures them. The others must start without torch.
OF_MODELS = {"bench", "oracle", "real", "resume", "vllm_contract", "workers"}
COLLECT = """
import sys, pytest
status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]])
print("status:", int(status), *sorted({"torch", "transformers", "vllm"} & sys.modules.keys()))
"""

LUA_FILES = sorted(p for p in ROOT.glob("contract/lua/*.lua") if not p.name.startswith("_"))
SCRIPTS = sorted(p for p in [*ROOT.glob("scripts/*"), ROOT / ".ci" / "run"] if not p.suffix)


def modules_of(package: str) -> list[Path]:
    """Without hidden folders, where vLLM keeps what it has compiled."""
    paths = sorted(ROOT.glob(f"{package}/**/*.py"))
    return [path for path in paths if "/." not in str(path.relative_to(ROOT))]


def lint_imports(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Checks the contracts of import-linter in pyproject.toml."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-P", "-c", program, "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("gateway.redis.key_ring", "gateway.routes.calls"),
        ("gateway.state", "gateway.follow.streams"),
        ("gateway.prepare.calls", "gateway.runners.submission"),
        ("workers.engine.interface", "workers.engine.engine"),
    ],
)
def test_an_import_of_a_room_above_breaks_the_contracts(
    importer: str, imported: str, tmp_path: Path
) -> None:
    for package in (*PACKAGES, "training"):
        copied = shutil.copytree if importer.startswith(f"{package}.") else os.symlink
        copied(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / importer.replace(".", "/")).with_suffix(".py").open("a") as module:
        module.write(f"\nimport {imported}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    siblings = " -> ".join("." + name.rpartition(".")[2] for name in (importer, imported))
    assert f"{importer} -> {imported}" in done.stdout or siblings in done.stdout


@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        ("contract", ["torch", "transformers", "fastapi", "tokenizers", "numpy"]),
        ("gateway", ["torch", "transformers", "numpy", "safetensors", "workers", "infra", "boto3"]),
        ("batchway_client", ["torch", "redis", "fastapi", "pydantic", "msgspec", "contract"]),
        ("contract/payloads", ["torch", "transformers", "fastapi", "redis", "numpy", "boto3"]),
        ("workers/engine", ["torch", "transformers", "redis", "tokenizers", "fastapi"]),
    ],
)
def test_a_package_imports_without_forbidden_packages(package: str, blocked: list[str]) -> None:
    """Every module of it, in a process where importing the others fails."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in modules_of(package)
    ]
    program = IMPORT_WITHOUT.format(blocked=blocked, modules=names)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign
def test_only_tests_of_models_import_torch() -> None:
    """A collection of all other folders, in a process of its own. Where one test needs torch, the
    test imports it."""
    folders = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    paths = [f"tests/{name}" for name in sorted(folders - OF_MODELS)]
    command = [sys.executable, "-c", COLLECT, "--ignore=tests/e2e/test_vectors.py", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "status: 0", done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize("path", LUA_FILES, ids=lambda path: path.name)
def test_lua_functions_document_arguments_and_results(path: Path) -> None:
    """The header names keys, arguments and reply, before the first line of code."""
    lines = path.read_text().splitlines()
    header = []
    for line in lines:
        if not line.startswith("--"):
            break
        header.append(line)
    assert header[0].startswith(f"-- {path.stem}: ")
    for word in ("KEYS", "ARGV", "reply"):
        assert any(line.startswith(f"-- {word} ") for line in header), f"no {word}"


def test_a_lua_helper_is_found_where_its_name_says() -> None:
    """A function `name.f` is in `_name.lua`, one without a prefix in the file that calls it or in
    _shared.lua. A constant of a shared file is used by functions, and by files that require it."""
    quiet = re.compile(r"'(?:[^'\\\n]|\\.)*'|--[^\n]*")
    texts = {path.stem: path.read_text() for path in ROOT.glob("contract/lua/*.lua")}
    code = {name: quiet.sub("", text) for name, text in texts.items()}
    for name, text in code.items():
        assert set(re.findall(r"^function (\w+)\.", text, re.M)) <= {name[1:], "redis"}, name
        if not name.startswith("_") or name == "_shared":
            continue
        helpers = re.findall(r"^local function (\w+)\(", text, re.M)
        users = [other for other in code if other.startswith("_") and other != name]
        constants = re.findall(r"^local ([A-Z_]+) =", text, re.M)
        for word, files in [(h, code) for h in helpers] + [(c, users) for c in constants]:
            called = re.compile(rf"(?<![\w.]){word}\b(?! =[^=])")
            using = [f for f in files if called.search(code[f])]
            using = [f for f in using if f"local {word} =" not in code[f]]
            required = [f for f in using if word in constants and name[1:] in _required(texts[f])]
            own = [f for f in using if f == name or f"local function {word}(" in code[f]]
            assert set(using) == {*required, *own}, f"{word} of {name}"


def _required(text: str) -> list[str]:
    """The shared files that a Lua file's header requires."""
    return re.findall(r"\w+", "".join(re.findall(r"^-- requires (.+)$", text, re.M)))


def test_no_number_of_a_function_is_negated() -> None:
    """Redis 7.0 writes the negated 0 as `-0`, which it does not take as a number: write `0 - n`."""
    for path in ROOT.glob("contract/lua/*.lua"):
        assert not re.search(r"[,(] ?-[a-z(]", path.read_text()), path.name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_docstring(package: str) -> None:
    """Except empty modules."""
    for path in modules_of(package):
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path.relative_to(ROOT)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_strict(path: Path) -> None:
    """At most 30 lines, executable, and they stop at the first error."""
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_SCRIPT_LINES
    assert "set -euo pipefail" in text
    assert path.stat().st_mode & 0o111


def test_the_page_of_options_is_as_they_are_declared() -> None:
    """After a change: python -m infra.options_page options > docs/options.md"""
    assert (ROOT / "docs" / "options.md").read_text() == options()


def test_the_page_of_fields_is_as_the_document_describes_them() -> None:
    """After a change: python -m infra.options_page fields > docs/api-fields.md"""
    assert (ROOT / "docs" / "api-fields.md").read_text() == fields()


def test_the_page_of_metrics_is_of_today() -> None:
    """After a change: python -m infra.options_page metrics > docs/metric-names.md"""
    assert (ROOT / "docs" / "metric-names.md").read_text() == metrics()


def test_each_claim_of_the_security_page_names_tests_that_exist() -> None:
    """A row of the page is a claim; its last column names files or folders of tests."""
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and " | `" in line]
    assert len(rows) > 25
    for row in rows:
        *_, claim, tests, _ = re.split(r" ?\| ?", row)
        names = re.findall(r"`([a-z_/]+(?:\.py)?)`", tests)
        assert names, claim
        for name in names:
            assert (ROOT / "tests" / name).exists(), name
