"""The documentation is correct: its code runs, and its links exist.

In README.md and docs/async.md every block marked `bash` or `python` is run, in order, each in its
own process, against one `batchway up` whose address replaces localhost:8000. Other languages are
not run. `<!-- not run: REASON -->` before a block excludes it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.stack import Stack
from tests.markdown import REASONS, Block, anchors, code_blocks, relative_links

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RUN_PAGES = (README, ROOT / "docs" / "async.md")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("docs/**/*.md")])
ADDRESS = re.compile(r"http://(?:localhost|127\.0\.0\.1):8000")
CURL_OPTIONS = "fail-with-body\nsilent\nshow-error\nmax-time = 100\n"

SAMPLE = """
# A page: with *marks*

<!-- not run: installs -->
```bash
pip install x
```

A [link](docs/a.md#part), an [outside link](https://example.org), <img src="docs/a.png">.

```text
[no link](nowhere.md)
```

1. Indented:

   ```python
   if True:
       print("http://localhost:8000")
   ```
"""


def readme_blocks() -> list[Block]:
    return code_blocks(README.read_text()) if README.exists() else []


def runnable_blocks() -> list[object]:
    """The blocks to run, of all pages."""
    return [
        pytest.param(block, id=f"{page.stem}-line-{block.line}")
        for page in RUN_PAGES
        for block in code_blocks(page.read_text())
        if block.is_runnable
    ]


def run_block(block: Block, url: str, temp_dir: Path) -> subprocess.CompletedProcess[str]:
    """Runs a block as a reader would, with another port."""
    (temp_dir / ".curlrc").write_text(CURL_OPTIONS)
    text = ADDRESS.sub(url, block.text)
    command = {
        "bash": ["bash", "-euo", "pipefail", "-c", text],
        "python": [sys.executable, "-c", text],
    }[block.language]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PATH": path, "CURL_HOME": str(temp_dir)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("block", runnable_blocks())
def test_a_block_of_a_page_runs(block: Block, stack: Stack, tmp_path: Path) -> None:
    """Its exit status is 0. HTTP errors fail it too, but for a cancel that comes after the job's
    end, as on a busy machine."""
    done = run_block(block, stack.url, tmp_path)
    is_late = "/cancel" in block.text and '"already_terminal"' in done.stdout
    assert done.returncode == 0 or is_late, f"{block.text}\n{done.stdout}\n{done.stderr}"


def test_the_readme_can_be_run() -> None:
    """It has blocks that run, and a known reason for each that does not."""
    if not README.exists():
        pytest.skip("README.md is not written yet")
    blocks = readme_blocks()
    assert any(block.is_runnable for block in blocks), "the README has no block that is run"
    for block in blocks:
        assert block.reason is None or block.reason in REASONS, f"line {block.line}"
        assert block.language, f"line {block.line}: a block without a language"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_links_exist(page: Path) -> None:
    """Files and headings."""
    for link in relative_links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text()), f"{page.name} links to {link}"


def test_blocks_are_found_with_their_marks() -> None:
    """Language, text without indentation, and the reason not to run it."""
    install, text, python = code_blocks(SAMPLE)
    assert (install.language, install.reason, install.is_runnable) == ("bash", "installs", False)
    assert not text.is_runnable
    assert python.is_runnable
    assert python.text == 'if True:\n    print("http://localhost:8000")\n'


def test_links_and_anchors_are_found() -> None:
    """Only links inside the repository, and none inside code."""
    assert relative_links(SAMPLE) == ["docs/a.md#part", "docs/a.png"]
    assert anchors(SAMPLE) == {"a-page-with-marks"}


def test_a_failing_block_is_noticed(tmp_path: Path) -> None:
    """A failing command in the middle, a Python error. The port is replaced."""
    url = "http://127.0.0.1:1"
    for language, text in (("bash", "false\ntrue\n"), ("python", "1 / 0\n")):
        assert run_block(Block(language, text, 1), url, tmp_path).returncode != 0
    shown = run_block(Block("bash", "echo http://localhost:8000/v1\n", 1), url, tmp_path)
    assert shown.stdout == f"{url}/v1\n"


@pytest.mark.e2e
def test_an_http_error_fails_a_block(stack: Stack, tmp_path: Path) -> None:
    """The test's curl options, not the README's, contain `--fail-with-body`."""
    found = Block("bash", "curl http://localhost:8000/v1/models\n", 1)
    absent = Block("bash", "curl http://localhost:8000/v1/nothing\n", 1)
    assert run_block(found, stack.url, tmp_path).returncode == 0
    assert run_block(absent, stack.url, tmp_path).returncode != 0
