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


def test_the_engine_package_imports_no_more_than_it_may() -> None:
    """The engine itself; of contract, what describes jobs, models, flows and errors."""
    script = (
        "import sys, workers.engine.engine\n"
        "names = {n for n in sys.modules if n.partition('.')[0] in "
        "('contract', 'workers', 'gateway', 'infra')}\n"
        "print(*sorted(n for n in names if not n.startswith('workers.engine.')))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert ended.stdout.split() == [
        "contract",
        "contract.byte_cache",
        "contract.endpoints",
        "contract.errors",
        "contract.events",
        "contract.fair_shares",
        "contract.flows",
        "contract.jobs",
        "contract.model_cards",
        "contract.output_formats",
        "workers",
        "workers.engine",
        "workers.ipc",
        "workers.ipc.messages",
        "workers.lanes",
    ]
