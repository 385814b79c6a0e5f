"""LiteLLM's proxy between the official client and the server."""

import importlib.metadata
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
from exercises import (
    ARGUMENTS,
    BASE_URL,
    DOCUMENTS,
    EMBEDDER,
    KEY,
    LONG_SUM,
    MODEL,
    QUESTION,
    RERANKER,
    RESPONSE_FORMAT,
    SUM,
    TOOL,
    URL,
    fits,
    main,
    ranks,
    says,
    works,
    works_on_demo,
    works_reasoning,
)

MESSAGES = [{"role": "user", "content": QUESTION}]
PROXY_KEY = "sk-no-key-is-asked-for-by-the-server-behind"
CONFIG = f"""\
model_list:
  - model_name: {MODEL}
    litellm_params: {{model: openai/{MODEL}, api_base: {BASE_URL}, api_key: {KEY}, max_retries: 0}}
  - model_name: {EMBEDDER}
    litellm_params: {{model: openai/{EMBEDDER}, api_base: {BASE_URL}, api_key: {KEY}}}
  - model_name: {RERANKER}
    litellm_params: {{model: hosted_vllm/{RERANKER}, api_base: {URL}, api_key: {KEY}}}
general_settings: {{master_key: {PROXY_KEY}}}
"""
START_S = 120


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def await_ready(proxy, url):
    until = time.monotonic() + START_S
    while time.monotonic() < until and proxy.poll() is None:
        try:
            if httpx.get(f"{url}/health/liveliness").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the proxy did not start")


@works("chat")
def whole():
    says(chat().choices[0].message.content)


@works("chat stream")
def stream():
    says("".join(c.choices[0].delta.content or "" for c in chat(stream=True) if c.choices))


@works_on_demo("completion")
def completion():
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=5)
    assert answer.choices[0].text


@works_on_demo("errors")
def too_long():
    try:
        chat([{"role": "user", "content": "a" * 5_000}])
    except openai.BadRequestError as exc:
        assert "ContextWindowExceededError" in str(exc)
        return
    raise AssertionError("no error")


@works("structured output")
def structured():
    asked = [{"role": "user", "content": SUM}]
    fits(chat(asked, response_format=RESPONSE_FORMAT).choices[0].message.content)


@works("tools")
def tools():
    answer = chat([{"role": "user", "content": LONG_SUM}], tools=[TOOL])
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS, call


@works_reasoning("reasoning apart")
def reasoning():
    message = chat().choices[0].message
    says(message.content)
    assert message.reasoning_content


@works_on_demo("embeddings")
def embeddings():
    assert len(client.embeddings.create(model=EMBEDDER, input=["a", "b"]).data) == 2


@works_on_demo("rerank")
def rerank():
    body = {"model": RERANKER, "query": QUESTION, "documents": DOCUMENTS}
    answer = client.post("/rerank", cast_to=httpx.Response, body=body)
    ranks(result["index"] for result in answer.json()["results"])


def chat(messages=MESSAGES, **options):
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **options)


port = free_port()
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.yaml").write_text(CONFIG)
    command = [Path(sys.executable).parent / "litellm", "--host=127.0.0.1", f"--port={port}"]
    proxy = subprocess.Popen(
        [*command, f"--config={folder}/config.yaml", "--telemetry=False"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )
    try:
        await_ready(proxy, f"http://127.0.0.1:{port}")
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key=PROXY_KEY,
            max_retries=0,
        )
        main(importlib.metadata.version("litellm"))
    finally:
        proxy.terminate()
        proxy.wait()
