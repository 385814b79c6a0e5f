"""The command line: its output and its errors."""

import argparse
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path
from string import Template

import pytest
import redis
import yaml  # type: ignore[import-untyped]  # types are a separate package
from packaging.requirements import Requirement

from infra import cli, options
from infra.embedded_redis import EmbeddedRedis
from infra.parser import build_parser
from infra.preconditions import RunningUp, check_store, write_note
from tests.infra.command_line import COMMANDS, call_cli, command_options
from tests.markdown import code_blocks
from workers.ipc.messages import EngineOptions
from workers.settings import LANES

ROOT = Path(__file__).resolve().parents[2]


def run_cli(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the real command without the caller's REDIS_URL."""
    base = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    return subprocess.run(
        [sys.executable, "-m", "infra", *arguments],
        env=base | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_default_of_every_option(command: str) -> None:
    for option in command_options(command):
        assert "(default: " in str(option.help), option.option_strings


UP = "import infra.local_stack; assert infra.cli.main(['up', '--host=0.0.0.0']) == 2"


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        ("pass", ["huggingface_hub"]),
        (
            "import infra.parser; infra.parser.build_parser().format_help()",
            ["torch", "transformers", "fastapi", "starlette", "pydantic", "numpy"],
        ),
        (UP, ["torch", "transformers", "fastapi", "uvicorn", "numpy"]),
    ],
    ids=["start", "help", "up"],
)
def test_no_heavy_package_is_imported_before_it_is_needed(program: str, heavy: list[str]) -> None:
    """Workers are installed without the gateway's packages; only the gateway's process needs the
    web framework, and only the check of a model the hub's library. `up` binds and stops here,
    because other hosts could connect without a key."""
    program = f"import sys, infra.cli; {program}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert ("refusing to listen on 0.0.0.0" in done.stderr) == ("main" in program)


def test_the_version_is_printed() -> None:
    done = run_cli("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("batchway ")


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("up --port 99999", "must be 0 to 65535, not '99999'"),
        ("up --port http", "must be 0 to 65535, not 'http'"),
        ("up --workers 0", "must be 1 to 64, not '0'"),
        ("up --threads -1", "must be an integer of at least 1, not '-1'"),
        ("up --max-num-seqs 1.5", "must be an integer of at least 1, not '1.5'"),
        ("up --drain-s -1", "must be a number of at least 0, not '-1'"),
        ("up --drain-s nan", "must be a number of at least 0, not 'nan'"),
        ("up --kv-cache-gib 0", "must be a number over 0, not '0'"),
        ("up --namespace a:b", "may not be empty or hold any of"),
        ("up --served-model-name 'two words'", "not 'two words'"),
        ("up --dtype int8", "invalid choice: 'int8'"),
        ("worker --lanes fast", "names out of interactive,standard,batch,scoring"),
        ("worker --lanes batch,batch", "different names"),
        ("worker --lease-s 0", "must be a number over 0, not '0'"),
        ("gateway --redis-url http://x", "must begin with redis://"),
        *(
            (f"worker --master={master}", f"must be HOST:PORT, not {master!r}")
            for master in ("host", "host:", ":1", "host:0", "host:65536", "host:x")
        ),
        ("keys create --tenant=acme --scopes=everything", "different names out of inference"),
        ("keys create --tenant=acme --lanes=fast", "different names out of"),
        ("keys create --tenant=acme --lane-share=1.5", "over 0, at most 1"),
        ("keys create --tenant=acme --requests-per-minute=0", "at least 1"),
        ("keys create --tenant=acme --retention-s=59", "at least 60"),
        ("keys create --tenant=acme --retention-s=nan", "at least 60"),
        ("keys create --tenant=acme --weight=101", "at least 0.01, at most 100"),
        ("keys create --tenant=acme --expires=0", "over 0"),
        *(
            (
                f"bench serve --prompt-tokens {given}",
                f"must be N or LOW:HIGH, integers of at least 1, not {given!r}",
            )
            for given in ("0", "9:4", "1:2:3", "a")
        ),
        ("bench serve --cancel-share 1.1", "must be a number of at least 0, at most 1, not '1.1'"),
        ("bench serve --base-url localhost:8000", "must begin with http:// or https://"),
        ("bench serve --rate 0", "must be a number over 0, not '0'"),
        *(
            (
                f"{command} --default-chat-template-kwargs={shlex.quote(raw)}",
                "must be a JSON object, as {",
            )
            for command in ("up", "worker")
            for raw in ("", "{", "[]", "1", "null", '"a"', "enable=false", '{"a": NaN}', "{'a': 1}")
        ),
    ],
)
def test_errors_name_the_bad_value(
    command: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 2, the option and what it must be."""
    words = shlex.split(command)
    with pytest.raises(SystemExit) as end:
        parse(*words)
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert complaint in said
    assert next(w for w in reversed(words) if w.startswith("--")).partition("=")[0] in said
    if "JSON" in complaint:
        assert said.endswith(f"not {words[-1].partition('=')[2]!r}")


def _groups() -> dict[tuple[str, ...], set[str]]:
    """The words that may follow each beginning of a command."""
    found = defaultdict[tuple[str, ...], set[str]](set)
    for words in map(str.split, COMMANDS):
        for place, word in enumerate(words):
            found[tuple(words[:place])].add(word)
    del found["callbacks",]  # a command by itself
    return found


@pytest.mark.parametrize(("given", "words"), _groups().items())
def test_a_command_line_that_ends_early_shows_what_may_follow(
    given: tuple[str, ...], words: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each word with its help, and last what is missing; with exit status 2."""
    with pytest.raises(SystemExit) as end:
        parse(*given)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert words <= set(re.findall(r"^    (\S+)", shown, re.MULTILINE))
    assert "error: the following arguments are required: " in shown.splitlines()[-1]


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host", "redis://u:secret@[::1", "redis://u:secret@h:port",
        "redis://u:secret@h:99999", "redis://h?socket_timeout=secret", "redis://h?secret=1",
        "redis://u:secret#x@h:1", "redis://u:secret/x@h:1", "rediss://h?ssl_cert_reqs=secret",
    ],
)  # fmt: skip
def test_a_bad_redis_url_is_not_quoted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It may contain a password."""
    with pytest.raises(SystemExit):
        parse("worker", "--redis-url", url)
    said = capsys.readouterr().err
    assert "--redis-url: must be" in said
    assert "secret" not in said


def test_variables_are_checked_like_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCHWAY_DRAIN_S", "soon")
    with pytest.raises(SystemExit):
        parse("up")
    assert "--drain-s: must be a number of at least 0, not 'soon'" in capsys.readouterr().err


def test_a_port_in_use_is_an_error() -> None:
    """Exit status 2, nothing started, one sentence without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in (("up",), ("gateway", "--redis-url", "redis://127.0.0.1:1")):
            done = call_cli(*command, "--port", str(port))
            assert done.returncode == 2
            assert done.stderr.splitlines() == [
                f"batchway {command[0]}: cannot listen on 127.0.0.1 port {port}: "
                "Address already in use; choose another with --port"
            ]


NOWHERE = "redis://127.0.0.1:1"
HASH = "--engine-module=tests.hash_engine --model=hash --served-model-name=m"
SECOND_NODE = "--engine=vllm --nodes=2 --node-rank=1 --master=127.0.0.1:1"  # needs no Redis
NO_ORIGIN = "BATCHWAY_ALLOWED_ORIGINS: 'https://a.b/' is no origin"


@pytest.mark.parametrize(
    ("command", "environ", "status", "complaint"),
    [
        ("gateway", {}, 2, "REDIS_URL"),
        ("worker", {}, 2, "REDIS_URL"),
        ("jobs list", {}, 2, "no Redis given"),
        ("keys list", {}, 2, "no Redis given"),
        ("drain --worker none", {}, 2, "no Redis given"),
        ("callbacks dead list", {}, 2, "no Redis given"),
        ("up --data-dir /tmp", {"REDIS_URL": NOWHERE}, 2, "--data-dir"),
        (
            f"up --port 0 --redis-url {NOWHERE}",
            {},
            1,
            "no Redis to work with: Redis does not answer",
        ),
        ("up --durability=durable", {}, 2, "needs --data-dir"),
        ("up --port=0 --data-dir /dev/null/x", {}, 1, "Not a directory"),
        ("up --port=0 --object-store /dev/null/x", {}, 2, "Not a directory"),
        ("up --candidate-share=0.5", {}, 2, "--candidate-share needs --candidate"),
        (
            f"up {HASH} --partitions=2",
            {},
            2,
            "2 partitions need as many workers of each model, but",
        ),
        *(
            (f"{part} --port 0 {more}", {"REDIS_URL": NOWHERE, **environ}, 2, complaint)
            for part in ("up", "gateway")
            for more, environ, complaint in (
                ("--host 0.0.0.0", {}, "BATCHWAY_API_KEY"),
                ("--allowed-origins https://a.b/", {}, NO_ORIGIN),
                ("", {"BATCHWAY_ALLOWED_ORIGINS": "http://localhost:3000,https://a.b/"}, NO_ORIGIN),
            )
        ),
        (f"worker {SECOND_NODE} --engine-python=/none", {}, 2, "no interpreter at"),
    ],
)
def test_what_cannot_run_is_an_error_before_anything_starts(
    command: str,
    environ: dict[str, str],
    status: int,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where a running `up` would be noted
    done = call_cli(*command.split(), **environ)
    assert done.returncode == status
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


EVICTS = ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
EVICTING = "maxmemory-policy is allkeys-lru; set it to noeviction"
DENIES = ("ACL", "SETUSER", "default", "-@all", "+ping", "+select")
DENYING = "Redis denies its user 'default'"


@pytest.mark.parametrize(
    ("setting", "command", "status", "reason"),
    [
        (EVICTS, "gateway --port 0", 2, EVICTING),
        (EVICTS, "worker", 2, EVICTING),
        (EVICTS, "up --port 0", 1, EVICTING),
        (DENIES, "gateway --port 0", 2, DENYING),
        (DENIES, "worker", 2, DENYING),
        (DENIES, "callbacks", 2, DENYING),
        (("ACL", "SETUSER", "default", "-info"), "up --port 0", 2, f"{DENYING[6:]} INFO"),
        (("REPLICAOF", "127.0.0.1", "1"), "up --port 0", 1, "Redis takes no writes"),
        (("CONFIG", "SET", "requirepass", "x"), "up --port 0", 1, "Redis refused the credentials"),
    ],
)
def test_a_redis_that_cannot_be_used_is_an_error(
    setting: tuple[str, ...], command: str, status: int, reason: str
) -> None:
    """One sentence: what is wrong and what to set. Nothing is started."""
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        client.execute_command(*setting)
        options = ["--redis-url", server.url]
        done = call_cli(*command.split(), *options, BATCHWAY_CALLBACK_KEY="k" * 16)
    assert done.returncode == status
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["gateway", "worker", "callbacks"])
@pytest.mark.parametrize("is_given_one", [True, False])
def test_another_object_store_for_a_namespace_is_an_error(
    command: str, is_given_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part with a store sets it. The error names both."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second") if is_given_one else ""
    monkeypatch.setenv("BATCHWAY_CALLBACK_KEY", "0123456789abcdef")
    with EmbeddedRedis() as server:
        check_store(server.url, "default", "")  # no store, no name
        check_store(server.url, "default", first)
        check_store(server.url, "default", first)
        check_store(server.url, "another", second)
        arguments = ["--redis-url", server.url, *(["--object-store", second] if second else [])]
        done = call_cli(command, *arguments, *(["--port", "0"] if command == "gateway" else []))
    assert done.returncode == 2
    assert "the namespace 'default' keeps its objects in dir:" in done.stderr
    assert ("given dir:" if second else "given no object store") in done.stderr
    assert "give all processes the same --object-store" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    assert cli.main(["worker", "--redis-url", "redis://127.0.0.1:1"]) == 2
    assert "torch not installed: run `pip install 'batchway[worker]'`" in capsys.readouterr().err
    assert cli.main(["up"]) == 2
    assert "torch not installed: run `pip install 'batchway[serve]'`" in capsys.readouterr().err


def test_up_installs_with_one_extra() -> None:
    """`serve` has every module that `up` imports, and Redis."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    [serve] = map(Requirement, extras["serve"])
    assert serve.extras >= {"gateway", "worker", "callbacks", "embedded-redis"}
    assert serve.extras <= set(extras)


def test_the_key_is_no_option() -> None:
    """`ps` shows every command line of the machine."""
    assert "api-key" not in build_parser().format_help()
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            parse(command, "--api-key", "x" * 32)


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/some-model", "some-model"), ("/models/llama/", "llama"), ("x", "x")],
)
def test_the_served_name_is_the_last_part_of_the_model(model: str, name: str) -> None:
    """Unless a name is given, or it is the demo model."""
    assert options.served_name(parse("worker", "--model", model)) == name
    assert options.served_name(parse("worker")) == "demo"
    assert options.served_name(parse("worker", "--served-model-name", "a/b")) == "a/b"


def test_options_reach_the_engine() -> None:
    """By vLLM's names. Options that are not given have the engine's defaults."""
    plain = options.engine_options(parse("worker", "--model", "m"))
    assert plain == EngineOptions(model_path="m")
    given = parse(
        *("worker", "--model=m", "--kv-cache-gib=0.5", "--threads=3", "--max-num-seqs=7"),
        *("--generation-config=none", "--tool-call-parser=hermes", "--reasoning-parser=qwen3"),
        '--default-chat-template-kwargs={"enable_thinking": false, "list": [1, {"a": null}]}',
    )
    assert options.engine_options(given) == EngineOptions(
        model_path="m",
        kv_memory_bytes=2**29,
        num_threads=3,
        max_num_seqs=7,
        generation_config="none",
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        chat_template_kwargs={"enable_thinking": False, "list": [1, {"a": None}]},
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--nodes=2", "--master=host:1"), "--nodes needs --engine vllm"),
        (("--engine=vllm", "--nodes=2"), "--nodes needs --master"),
        (("--engine=vllm", "--node-rank=1"), "--node-rank and --master need --nodes"),
        (("--engine=vllm", "--nodes=2", "--node-rank=2", "--master=host:1"), "must be below 2"),
    ],
)
def test_errors_name_wrong_options_of_nodes(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=complaint):
        options.engine_options(parse("worker", *words))


def test_the_manifest_in_the_guide_runs_a_command_that_exists() -> None:
    """With the variables that LeaderWorkerSet sets in a pod."""
    blocks = code_blocks((ROOT / "docs" / "scaling.md").read_text())
    manifests = [yaml.safe_load(b.text) for b in blocks if b.language == "yaml"]
    [manifest] = [each for each in manifests if each["kind"] == "LeaderWorkerSet"]
    spec = manifest["spec"]["leaderWorkerTemplate"]
    [container] = spec["workerTemplate"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c"]
    [line] = container["args"]
    pod = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.host"}
    words = shlex.split(Template(line).substitute(pod))
    assert words[:5] == ["exec", "python", "-m", "infra", "worker"]
    parsed = parse("worker", *words[5:])
    expected = {"nodes": spec["size"], "node_rank": 1, "master": "leader.host:29600"}
    assert options.node_options(parsed) == expected
    assert parsed.drain_s < spec["workerTemplate"]["spec"]["terminationGracePeriodSeconds"]


def test_a_worker_of_up_gets_the_same_options() -> None:
    """The arguments that `up` passes on yield the same engine and name."""
    words = (
        *("--max-model-len=512", "--dtype=float32", "--attention=torch"),
        *("--generation-config=none", "--tool-call-parser=hermes", "--reasoning-parser=none"),
        '--default-chat-template-kwargs={"a b": "c=\'d\' é", "e": [null, 1.5, true]}',
    )
    given = parse("up", "--model=org/m", "--torch-only", "--quantization=int8", *words)
    again = parse("worker", *options.model_arguments(given))
    assert options.engine_options(again) == options.engine_options(given)
    assert options.served_name(again) == options.served_name(given)
    assert again.lanes == LANES


def test_one_of_several_running_stacks_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error lists their addresses, without those that have ended."""
    for number, pid in enumerate((os.getpid(), os.getppid(), 2**22 - 1)):
        folder = tmp_path / f"batchway-{number}"
        folder.mkdir()
        write_note(folder, RunningUp(pid, f"unix:///{number}.sock", "default", f"http://u{number}"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = call_cli("jobs", "list")
    assert done.returncode == 2
    assert "unix:///0.sock (at http://u0)" in done.stderr
    assert "unix:///1.sock" in done.stderr
    assert "unix:///2.sock" not in done.stderr


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("/nowhere/at/all", "there is no folder /nowhere/at/all"),
        ("nobody/nothing", "the Hugging Face Hub gives no such model"),
        ("two words", "the Hugging Face Hub gives no such model"),
    ],
)
def test_a_wrong_model_is_an_error_before_anything_starts(model: str, complaint: str) -> None:
    done = run_cli("up", "--port=0", "--model", model, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("models: [{name: a, ensemble: {members: [a, m], combine: vote}}]", "a -> a"),
        ("models: [{name: a, ensemble: {members: [m], combine: vote}}]", "length >= 2"),
        ("models: [{name: a, ensemble: {members: [demo, x], combine: vote}}]", "no model 'x'"),
        ("models: [", "line 1"),
    ],
    ids=["cycle", "one member", "unknown member", "no YAML"],
)
def test_wrong_flows_are_an_error_before_anything_starts(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    done = call_cli("up", "--port=0", f"--models={path}")
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
