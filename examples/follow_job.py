"""Prints a job's text as it is generated. After a restart it continues where it stopped.

    python -m examples.follow_job http://127.0.0.1:8000 job-0-5f… position.txt

The file holds the id of the last printed event. After a broken connection the client resumes by
itself, without the file.
"""

import sys
from pathlib import Path

from batchway_client import Client, Event


def text_of(event: Event) -> str:
    """The text that an event adds; a chat and a completion have different chunks."""
    if event.type != "message":
        return ""
    [choice] = event.data["choices"]
    return str(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])


def remember(position: Path, event_id: str) -> None:
    """Replaces the file atomically; writing in place could leave it empty after a crash."""
    new = position.with_suffix(".new")
    new.write_text(event_id)
    new.replace(position)


def main(url: str, job_id: str, position: Path) -> None:
    after = position.read_text(encoding="utf-8") if position.exists() else None
    with Client(url) as client:
        for event in client.events(job_id, after=after):
            print(text_of(event), end="", flush=True)
            if event.id is not None:
                remember(position, event.id)
            if event.is_end:
                print(f"\n[{event.type}]")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
