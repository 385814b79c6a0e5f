"""`llm`, on the command line."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from exercises import (
    BASE_URL,
    KEY,
    MODEL,
    QUESTION,
    SCHEMA,
    SUM,
    fits,
    main,
    says,
    works,
    works_on_demo,
)

MODELS = f"""\
- model_id: {MODEL}
  model_name: {MODEL}
  api_base: {BASE_URL}
  supports_schema: true
- model_id: {MODEL}-text
  model_name: {MODEL}
  api_base: {BASE_URL}
  completion: true
"""


def run(*arguments):
    command = [Path(sys.executable).parent / "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


@works("chat")
def whole():
    says(run("-m", MODEL, "--no-stream", "-o", "temperature", "0", QUESTION))


@works("chat stream")
def stream():
    says(run("-m", MODEL, "-o", "temperature", "0", QUESTION))


@works_on_demo("completion")
def completion():
    assert run("-m", f"{MODEL}-text", "-o", "max_tokens", "5", "1, 2, 3,").strip()


@works("structured output")
def structured():
    fits(run("-m", MODEL, "--schema", json.dumps(SCHEMA), SUM))


with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "extra-openai-models.yaml").write_text(MODELS)
    environ = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": KEY}
    main(importlib.metadata.version("llm"))
