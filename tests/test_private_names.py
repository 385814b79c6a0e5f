"""The product uses documented names of these libraries only.

Files named `*_compat.py` are excluded: they contain the uses of undocumented names, with reasons,
and have a test that tells what breaks.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import modules_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "batchway_client", "bench", "contract", "examples", "gateway", "infra", "training", "workers",
)  # fmt: skip

# The modules that each library documents, without their submodules.
DOCUMENTED = {
    "uvicorn": {"uvicorn"},
    "starlette": {
        "starlette.applications", "starlette.background", "starlette.concurrency",
        "starlette.datastructures", "starlette.exceptions", "starlette.middleware",
        "starlette.middleware.cors", "starlette.requests", "starlette.responses",
        "starlette.routing", "starlette.status", "starlette.testclient", "starlette.types",
    },
    "fastapi": {
        "fastapi", "fastapi.encoders", "fastapi.exception_handlers", "fastapi.exceptions",
        "fastapi.openapi.utils", "fastapi.responses", "fastapi.routing", "fastapi.security",
        "fastapi.sse", "fastapi.telemetry", "fastapi.testclient",
    },
    "redis": {
        "redis", "redis.asyncio", "redis.asyncio.client", "redis.asyncio.retry", "redis.backoff",
        "redis.exceptions", "redis.retry",
    },
    "rq": {"rq", "rq.exceptions", "rq.job", "rq.serializers", "rq.timeouts", "rq.worker"},
    "httpx": {"httpx"},
    "prometheus_client": {
        "prometheus_client", "prometheus_client.core", "prometheus_client.parser",
        "prometheus_client.registry",
    },
    "transformers": {
        "transformers", "transformers.utils.chat_parsing", "transformers.utils.logging",
    },
}  # fmt: skip

# Attributes of libraries that this test does not check: named tuples, argparse, os and torch.
_OTHERS = {
    "_ActionsContainer", "_ArgumentGroup", "_C", "_SubParsersAction", "_asdict", "_exit", "_fields",
    "_forward_hooks", "_forward_pre_hooks", "_has_mkldnn", "_is_mkldnn_bf16_supported",
    "_linear_pointwise", "_reorder_linear_weight", "_replace",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def library_of(module: str) -> str | None:
    top = module.partition(".")[0]
    return top if top in DOCUMENTED else None


class Source:
    """One file: the nodes of its syntax tree, and the full names of its imports."""

    def __init__(self, text: str, name: str = "") -> None:
        self.name = name
        self.nodes = [*ast.walk(ast.parse(text))]
        self.meanings: dict[str, str] = {}
        self.imports: list[tuple[str, str]] = []  # module, name; '' if the whole module is imported
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports.append((alias.name, ""))
                    top = alias.name.partition(".")[0]
                    self.meanings[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imports.append((node.module, alias.name))
                    self.meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        self.classes = {n.name: n for n in self.nodes if isinstance(n, ast.ClassDef)}

    def meaning(self, node: ast.AST) -> str:
        """The dotted name of an expression, or ''."""
        if isinstance(node, ast.Subscript):
            return self.meaning(node.value)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return self.meanings.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def library_bases(self, class_: ast.ClassDef) -> Iterator[str]:
        """The library classes that a class extends, also indirectly."""
        for base in class_.bases:
            name = self.meaning(base)
            module, _, local = name.rpartition(".")
            if library_of(name):
                yield name
            elif not module and local in self.classes and local != class_.name:
                yield from self.library_bases(self.classes[local])
            elif (ROOT / f"{module.replace('.', '/')}.py").is_file():
                other = source_of(f"{module.replace('.', '/')}.py")
                if local in other.classes:
                    yield from other.library_bases(other.classes[local])


@cache
def source_of(path: str) -> Source:
    return Source((ROOT / path).read_text(), path)


@cache
def private_names_of(name: str) -> set[str]:
    """The private names that a library's class and its bases define or use."""
    module, _, local = name.rpartition(".")
    found = set()
    for class_ in inspect.getmro(getattr(importlib.import_module(module), local)):
        for attribute, value in vars(class_).items() if library_of(class_.__module__) else ():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            code = getattr(function, "__code__", None)
            found |= {attribute, *(code.co_names if code else ())}
    return set(filter(is_private, found))


def own_names(sources: list[Source]) -> set[str]:
    """Every private name that our code defines: functions, classes, variables, attributes."""
    found = set()
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and is_of_self(node):
                found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return {name for name in found if is_private(name)}


def offences(source: Source, own: set[str]) -> Iterator[str]:
    """The undocumented names in a file."""
    for module, name in source.imports:
        if library := library_of(module):
            known = DOCUMENTED[library]
            full = f"{module}.{name}" if name else module
            if any(is_private(part) for part in full.split(".")) or (
                module not in known and full not in known
            ):
                yield full
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_of_self(node):
            yield from {node.attr} - own - _OTHERS
    for class_ in source.classes.values():
        used = {
            n.name for n in class_.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        used |= {n.attr for n in ast.walk(class_) if isinstance(n, ast.Attribute)}
        for base in source.library_bases(class_):
            for name in used & private_names_of(base):
                yield f"{base}.{name}"


def all_sources() -> list[Source]:
    paths = [path for package in PACKAGES for path in modules_of(package)]
    return [source_of(str(path.relative_to(ROOT))) for path in paths]


def test_no_file_uses_private_names_of_a_library() -> None:
    """Except files named `*_compat.py`."""
    sources = all_sources()
    own = own_names(sources)
    checked = [source for source in sources if not source.name.endswith("_compat.py")]
    found = {(source.name, name) for source in checked for name in offences(source, own)}
    assert found == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from uvicorn._types import Scope", {"uvicorn._types.Scope"}),
        ("from uvicorn.server import Server", {"uvicorn.server.Server"}),
        ("import redis.asyncio.connection", {"redis.asyncio.connection"}),
        ("import httpx\nhttpx._client", {"_client"}),
        ("def f(client): client._transport = None", {"_transport"}),
        ("import httpx\nclass A(httpx.Auth):\n def _own(self): pass", set()),
        (
            "import httpx\nclass A(httpx.Client):\n pass\n"
            "class B(A):\n def _init_transport(self): pass",
            {"httpx.Client._init_transport"},
        ),
        ("import httpx\nclass A(httpx.Client):\n def f(self): self._base_url",
         {"httpx.Client._base_url"}),
        ("from transformers.utils import logging\nimport redis.asyncio, httpx", set()),
    ],
)  # fmt: skip
def test_each_kind_of_private_name_is_found(text: str, expected: set[str]) -> None:
    """Imports, attributes, and what a class overrides or reads of its base."""
    assert set(offences(Source(text), set())) == expected
