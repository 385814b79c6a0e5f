"""The engine runs where torch and Redis are not installed."""

import subprocess
import sys

MODULES = (
    "workers.engine.engine",
    "workers.engine.strategy",
    "workers.ipc.messages",
    "workers.engine_process.engine_loop",
    "tests.fakes",
    "tests.hash_engine",
)
BLOCKED = ("torch", "transformers", "redis")

SCRIPT = f"""
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
for module in {MODULES!r}:
    importlib.import_module(module)
"""


def test_the_engine_imports_without_torch_and_redis() -> None:
    """In a process where importing either fails."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
