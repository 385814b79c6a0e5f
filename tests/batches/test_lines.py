"""The lines of a file, read bit by bit."""

import asyncio
import io
import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.connection import end_tasks
from contract.files import content_key, new_file_id
from contract.jobs import Endpoint
from contract.payloads.directory import DirectoryStore
from gateway.files import lines
from gateway.http.bodies import JsonBodies
from gateway.runners.batches.lines import Validation
from tests.batches.test_batches import COMPLETIONS, jsonl, line

pytestmark = pytest.mark.anyio

NUM_LINES = 1_000
MARK = b"\xef\xbb\xbf"


async def test_other_tasks_run_while_a_file_is_validated(tmp_path: Path) -> None:
    """Every fifty lines at least, though the lines come from one read."""
    store, file_id = DirectoryStore(tmp_path), new_file_id()
    content = jsonl([line(f"{number}") for number in range(NUM_LINES)])
    store.write(content_key(file_id), io.BytesIO(content))
    validation = Validation(Endpoint(COMPLETIONS), NUM_LINES, JsonBodies())
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


BLANK = st.sampled_from([b"", b" ", b"\t", b"\r", b" \r", b"\x0b", MARK, MARK + b" \r"])
GOOD = st.sampled_from([b"%b", MARK + b"%b", b" %b ", b"%b\r", MARK + b"\t%b\r"])


@settings(max_examples=300, deadline=None)
@given(st.lists(BLANK | GOOD | st.just(b"wrong"), max_size=40), st.booleans())
async def test_blank_lines_are_skipped_and_others_keep_their_numbers(
    kinds: list[bytes], has_end: bool
) -> None:
    """Any mixture of blank lines, marks, good and bad lines, with and without a last line end."""
    texts = [
        kind.replace(b"%b", json.dumps(line(f"id-{number}")).encode())
        for number, kind in enumerate(kinds, 1)
    ]
    with tempfile.TemporaryDirectory() as folder:
        store, file_id = DirectoryStore(Path(folder)), new_file_id()
        content = b"\n".join(texts) + (b"\n" if has_end else b"")
        store.write(content_key(file_id), io.BytesIO(content))
        validation = Validation(Endpoint(COMPLETIONS), NUM_LINES, JsonBodies())
        await validation.run(lines(store, file_id, len(content), max_line_bytes=1_000))
    wrong = [number for number, kind in enumerate(kinds, 1) if kind == b"wrong"]
    num_requests = sum(b"%b" in kind or kind == b"wrong" for kind in kinds)
    expected: list[tuple[int | None, str]] = [(number, "invalid_json_line") for number in wrong]
    found = [(error.line, error.code) for error in validation.errors]
    assert found == (expected if num_requests else [(None, "empty_file")])
    assert validation.num_lines == num_requests


@pytest.mark.parametrize("text", [b"\n", jsonl([line("a")])], ids=["blank", "requests"])
async def test_a_file_of_too_many_lines_is_refused(tmp_path: Path, text: bytes) -> None:
    """Also where they are blank: to skip them takes time."""
    store, file_id = DirectoryStore(tmp_path), new_file_id()
    store.write(content_key(file_id), io.BytesIO(text * 11))
    validation = Validation(Endpoint(COMPLETIONS), 10, JsonBodies())
    await validation.run(lines(store, file_id, len(text) * 11, max_line_bytes=1_000))
    assert [error.code for error in validation.errors] == ["too_many_lines"]
