"""guidellm, on the command line."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from exercises import MODEL, URL, main, works

NUM_REQUESTS = 12


def load(request_format):
    with tempfile.TemporaryDirectory() as folder:
        backend = f"kind=openai_http,target={URL},model={MODEL},request_format={request_format}"
        command = [Path(sys.executable).parent / "guidellm", "run", f"--backend={backend}"]
        command += ["--profile=kind=concurrent,streams=4", "--disable-console"]
        command += [f"--constraint=kind=max_requests,count={NUM_REQUESTS}"]
        command += [f"--tokenizer=kind=huggingface_auto,model={os.environ['CLIENTS_TOKENIZER']}"]
        command += ["--data=kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
        command += [f"--output=kind=json,path={folder}/report.json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = Path(folder) / "report.json"
        if done.returncode or not report.exists():
            raise RuntimeError(done.stdout + done.stderr)
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] == NUM_REQUESTS, totals
        assert totals["errored"] == 0, totals


@works("load on chats, streamed")
def chats():
    load("/v1/chat/completions")


@works("load on completions, streamed")
def completions():
    load("/v1/completions")


main(importlib.metadata.version("guidellm"))
