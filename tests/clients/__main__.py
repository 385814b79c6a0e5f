"""Runs clients against `batchway up` on the demo model: `scripts/clients`. Exits with 1 if an
exercise failed."""

import argparse
import sys
import time
from pathlib import Path

from tests.clients.run import CLIENTS, ROOT, exercise, prepare, table
from tests.infra.stack import running_demo_stack

PAGE = ROOT / "docs/clients.md"
HEAD = """\
# Clients

What was tried, end to end, against `batchway up` on the demo model, by `scripts/clients`, which \
also writes this page. Each client runs in an environment of its own. What the server or the demo \
model cannot do is refused with an error that names it; nothing is silently left out.

"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    results = {}
    with running_demo_stack() as stack:
        for name in options.names or CLIENTS:
            prepare(CLIENTS[name])
            started_s = time.monotonic()
            results[name] = exercise(CLIENTS[name], stack.url)
            print(f"{name}: {time.monotonic() - started_s:.0f} s", flush=True)
            for line in results[name]:
                if line["error"]:
                    print(f"  {line['name']}: {line['error']}", flush=True)
    if options.write:
        Path(PAGE).write_text(HEAD + table(results))
    return int(any(line["error"] for lines in results.values() for line in lines))


if __name__ == "__main__":
    sys.exit(main())
