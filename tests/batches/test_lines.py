"""The lines of a file, read bit by bit."""

import asyncio
import io
import itertools
from pathlib import Path

import pytest

from contract.connection import end_tasks
from contract.files import content_key, new_file_id
from contract.jobs import Endpoint
from contract.payloads.directory import DirectoryStore
from gateway.batches.lines import Validation
from gateway.files.contents import lines
from tests.batches.test_batches import COMPLETIONS, jsonl, line

pytestmark = pytest.mark.anyio

NUM_LINES = 1_000


async def test_other_tasks_run_while_a_file_is_validated(tmp_path: Path) -> None:
    """Every fifty lines at least, though the lines come from one read."""
    store, file_id = DirectoryStore(tmp_path), new_file_id()
    content = jsonl([line(f"{number}") for number in range(NUM_LINES)])
    store.write(content_key(file_id), io.BytesIO(content))
    validation = Validation(Endpoint(COMPLETIONS), NUM_LINES)
    seen = {0}  # numbers of lines, as seen by another task

    async def look() -> None:
        while True:
            seen.add(validation.num_lines)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await validation.run(lines(store, file_id, len(content), max_line_bytes=1_000))
    await end_tasks(looking)
    assert (validation.num_lines, validation.errors) == (NUM_LINES, [])
    turns = sorted({*seen, NUM_LINES})
    assert max(b - a for a, b in itertools.pairwise(turns)) <= 50
