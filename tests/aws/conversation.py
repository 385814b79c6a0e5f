"""A program at a terminal, whose questions a test answers as they are asked."""

import os
import pty
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
_QUESTION = re.compile(r"([^\n]*?) ?\[([^\n]*)\]: $")


def converse(
    command: Sequence[str], answers: Mapping[str, str], *, folder: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """Answers each question by its beginning, all others with Enter; returns the questions with
    what they offer. Raises AssertionError with all output if the program fails."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        command, cwd=folder, env=dict(environ), stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    text, begun, asked = "", 0, {}
    with suppress(OSError):  # the program has closed its end
        while part := os.read(terminal, 65_536):
            text += part.decode(errors="replace")
            said = _ANSI.sub("", text[begun:]).replace("\r", "")
            if (question := _QUESTION.search(said)) is not None:
                name = question[1].strip()
                asked[name] = question[2]
                begun = len(text)
                answer = next((a for q, a in answers.items() if name.startswith(q)), "")
                os.write(terminal, f"{answer}\n".encode())
    os.close(terminal)
    assert process.wait(timeout=60) == 0, text
    return asked
