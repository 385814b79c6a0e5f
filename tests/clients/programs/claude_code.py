"""Claude Code, which works on a file by its own tools: its long system prompt, dozens of tools."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from exercises import KEY, MODEL, URL, main, works

NODE = Path(os.environ["CLIENTS_NODE"])
CLAUDE = NODE / "node_modules/.bin/claude"
VERSION = json.loads((NODE / "node_modules/@anthropic-ai/claude-code/package.json").read_text())
LIMIT_S = 120
SETTINGS = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": KEY,
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


def edits(*more: str) -> dict[str, object]:
    """What it says of its work on a file: read by a tool, edited by another, in three turns."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "notes.txt")
        file.write_text("one alpha two\n")
        task = " ".join([f"In the file {file} replace alpha by beta.", *more])
        options = ["--output-format=json", "--allowedTools=Read,Edit"]
        done = subprocess.run(
            [CLAUDE, "-p", task, *options],
            cwd=folder,
            env={**os.environ, **SETTINGS, "HOME": folder},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]
        report = json.loads(done.stdout)
        assert file.read_text() == "one beta two\n", report
        assert report["result"] == f"I replaced alpha by beta in {file}.", report
        assert report["num_turns"] == 3, report
        return report


@works("a file read and edited by its tools")
def task():
    used = edits()["usage"]
    assert used["input_tokens"] > 3 * 10_000, used


@works("the same, its worker killed in the middle of an answer")
def killed():
    edits("(kill:12:claude)")


main(VERSION["version"])
