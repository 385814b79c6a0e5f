"""Reads Markdown pages: their code blocks, links and headings."""

import re
import textwrap
from dataclasses import dataclass

RUNNABLE = ("bash", "python")
REASONS = frozenset({"installs", "network", "starts the server", "needs a GPU", "needs AWS"})
_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|\bsrc=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block; `line` is the number of its fence, `reason` why it is not run."""

    language: str
    text: str
    line: int
    reason: str | None = None

    @property
    def is_runnable(self) -> bool:
        return self.language in RUNNABLE and self.reason is None


def code_blocks(markdown: str) -> list[Block]:
    """All fenced blocks, in order."""
    blocks: list[Block] = []
    lines = iter(enumerate(markdown.splitlines(), start=1))
    last_words = ""  # the last line before the block that is not empty
    for number, line in lines:
        if (fence := _FENCE.match(line)) is None:
            last_words = line.strip() or last_words
            continue
        body = []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            body.append(inner)
        not_run = _NOT_RUN.fullmatch(last_words)
        text = textwrap.dedent("\n".join(body)) + "\n"
        blocks.append(Block(fence[2], text, number, not_run[1] if not_run else None))
        last_words = ""
    return blocks


def relative_links(markdown: str) -> list[str]:
    """Targets of links and images inside the repository, outside code blocks."""
    prose = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    targets = (first or second for first, second in _LINK.findall(prose))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(markdown: str) -> set[str]:
    """The names under which GitHub links to the headings of a page."""
    prose = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose))
    return {words.replace(" ", "-") for words in kept}
