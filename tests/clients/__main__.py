"""Runs clients against `batchway up --fleet`: `scripts/clients`. Exits with 1 if an exercise
failed."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.clients.models import write_fleet
from tests.clients.run import CLIENTS, ROOT, exercise, prepare, table
from tests.infra.stack import running_fleet

PAGE = ROOT / "docs/clients.md"
HEAD = """\
# Clients

What was tried by `scripts/clients`, which writes this page, against `batchway up --fleet` on \
the demo model, a random embedder and reranker and, *in italics*, on a model that reasons and \
calls tools as Qwen3 does, whose answers are made up; coding agents on one that reads and edits a \
file as it is asked to. Each client runs in an environment of its own. What the server cannot do \
is refused with an error that names it.

- **Claude Code**: `ANTHROPIC_BASE_URL` is the server without `/v1`, `ANTHROPIC_AUTH_TOKEN` an API \
key, `ANTHROPIC_MODEL` and `ANTHROPIC_DEFAULT_HAIKU_MODEL` a model whose context holds 20,000 \
tokens of instructions and tools beside the work; `CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1` \
keeps it from other servers. Its web search fails: no server of it is here.
- **LangChain**: `OpenAIEmbeddings` needs `check_embedding_ctx_length=False`; otherwise it sends \
token ids of OpenAI's tokenizer in place of texts.
- **LiteLLM**: `infinity/` needs `return_documents=False` and drops `max_tokens_per_doc`, as \
`jina_ai/` does; `hosted_vllm/` and `cohere/` do neither.

## Coding agents

They were tried without any other network. `MODEL` is a name of `GET /v1/models`; without API keys \
any key will do. Tell an agent the model's context: it shortens its history before that is full.

**Claude Code**: `ANTHROPIC_BASE_URL=http://127.0.0.1:8000`, `ANTHROPIC_AUTH_TOKEN=KEY`, \
`ANTHROPIC_MODEL=MODEL`, `ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL`, \
`CLAUDE_CODE_AUTO_COMPACT_WINDOW=65536`; \
`CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1` switches off telemetry and updates.

**Codex CLI**: in `~/.codex/config.toml`, with the key in `BATCHWAY_API_KEY`. Its tools \
`web_search` and sub-agents are left out and named in `x-ignored-parameters`. Its own sandbox was \
not tried: `sandbox_mode = "danger-full-access"`.

```toml
model = "MODEL"
model_context_window = 65536
model_provider = "batchway"
check_for_update_on_startup = false
[model_providers.batchway]
name = "batchway"
base_url = "http://127.0.0.1:8000/v1"
env_key = "BATCHWAY_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
```

**opencode**: in `~/.config/opencode/opencode.json`, with the key in `BATCHWAY_API_KEY`; \
`OPENCODE_DISABLE_MODELS_FETCH=1` keeps it from a list of models elsewhere.

```json
{
  "autoupdate": false,
  "share": "disabled",
  "model": "batchway/MODEL",
  "provider": {
    "batchway": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "http://127.0.0.1:8000/v1", "apiKey": "{env:BATCHWAY_API_KEY}"},
      "models": {"MODEL": {"limit": {"context": 65536, "output": 8192}}}
    }
  }
}
```

**qwen-code**: `OPENAI_BASE_URL=http://127.0.0.1:8000/v1`, `OPENAI_API_KEY=KEY`, \
`OPENAI_MODEL=MODEL`, `--auth-type openai`; in `~/.qwen/settings.json` `general` and `privacy` \
switch off updates and telemetry.

```json
{
  "model": {"generationConfig": {"contextWindowSize": 65536}},
  "general": {"enableAutoUpdate": false},
  "privacy": {"usageStatisticsEnabled": false}
}
```

## Results

"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument(
        "--write", action="store_true", help=f"write their rows of {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    results = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(write_fleet(Path(folder))) as stack,
    ):
        for name in options.names or CLIENTS:
            prepare(CLIENTS[name])
            started_s = time.monotonic()
            results[name] = exercise(CLIENTS[name], stack.url)
            print(f"{name}: {time.monotonic() - started_s:.0f} s", flush=True)
            for line in results[name]:
                if line["error"]:
                    print(f"  {line['name']} ({line['model']}): {line['error']}", flush=True)
    if options.write:
        PAGE.write_text(HEAD + table(results, PAGE.read_text()))
    return int(any(line["error"] for lines in results.values() for line in lines))


if __name__ == "__main__":
    sys.exit(main())
