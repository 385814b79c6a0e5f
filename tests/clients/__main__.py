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

"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
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
        Path(PAGE).write_text(HEAD + table(results))
    return int(any(line["error"] for lines in results.values() for line in lines))


if __name__ == "__main__":
    sys.exit(main())
