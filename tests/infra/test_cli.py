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


def test_help_imports_no_heavy_package() -> None:
    """Neither torch nor the gateway's packages, because workers are installed without these."""
    program = (
        "import sys, infra.cli, infra.parser; infra.parser.build_parser().format_help(); "
        "heavy = ('torch', 'transformers', 'fastapi', 'starlette', 'pydantic', 'numpy'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_line_starts_without_the_hub_s_library() -> None:
    """All processes start by it; only the check of a model before its worker starts needs it."""
    program = "import sys, infra.cli; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_up_imports_no_heavy_package_before_its_parts_start() -> None:
    """Only the gateway's process needs the web framework. Here `up` binds and stops, because
    other hosts could connect without a key."""
    program = (
        "import sys, infra.cli, infra.local_stack; "
        "code = infra.cli.main(['up', '--host=0.0.0.0']); "
        "heavy = ('torch', 'transformers', 'fastapi', 'uvicorn', 'numpy'); "
        "print(code, [m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "refusing to listen on 0.0.0.0" in done.stderr
    assert done.stdout.strip() == "2 []", done.stderr


def test_the_version_is_printed() -> None:
    """`batchway --version` names the program."""
    done = run_cli("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("batchway ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("up", "--port", "99999"), "must be 0 to 65535, not '99999'"),
        (("up", "--port", "http"), "must be 0 to 65535, not 'http'"),
        (("up", "--workers", "0"), "must be 1 to 64, not '0'"),
        (("up", "--threads", "-1"), "must be an integer of at least 1, not '-1'"),
        (("up", "--max-num-seqs", "1.5"), "must be an integer of at least 1, not '1.5'"),
        (("up", "--drain-s", "-1"), "must be a number of at least 0, not '-1'"),
        (("up", "--drain-s", "nan"), "must be a number of at least 0, not 'nan'"),
        (("up", "--kv-cache-gib", "0"), "must be a number over 0, not '0'"),
        (("up", "--namespace", "a:b"), "may not be empty or hold any of"),
        (("up", "--served-model-name", "two words"), "not 'two words'"),
        (("up", "--dtype", "int8"), "invalid choice: 'int8'"),
        (
            ("worker", "--lanes", "fast"),
            "names out of interactive,standard,batch,scoring",
        ),
        (("worker", "--lanes", "batch,batch"), "different names"),
        (("worker", "--lease-s", "0"), "must be a number over 0, not '0'"),
        (("gateway", "--redis-url", "http://x"), "must begin with redis://"),
    ],
)
def test_errors_name_the_bad_value(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 2, the option and what it must be."""
    with pytest.raises(SystemExit) as end:
        parse(*arguments)
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


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


def test_a_bad_redis_url_is_not_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    """It may contain a password."""
    with pytest.raises(SystemExit):
        parse("worker", "--redis-url", "https://user:secret@host")
    assert "secret" not in capsys.readouterr().err


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


@pytest.mark.parametrize("command", ["up", "gateway"])
def test_what_is_no_origin_is_an_error(command: str) -> None:
    """Of the option as of the variable; nothing is started."""
    wrong = "https://app.example.com/"
    for words, environ in (
        (("--allowed-origins", wrong), {}),
        ((), {"BATCHWAY_ALLOWED_ORIGINS": f"http://localhost:3000,{wrong}"}),
    ):
        done = call_cli(command, "--port", "0", *words, REDIS_URL="redis://127.0.0.1:1", **environ)
        assert done.returncode == 2
        assert f"BATCHWAY_ALLOWED_ORIGINS: {wrong!r} is no origin" in done.stderr


@pytest.mark.parametrize("command", ["up", "gateway"])
def test_calls_from_other_hosts_need_a_key(command: str) -> None:
    """Listening beyond loopback without BATCHWAY_API_KEY is an error."""
    done = call_cli(command, "--host", "0.0.0.0", "--port", "0", REDIS_URL="redis://127.0.0.1:1")
    assert done.returncode == 2
    assert "BATCHWAY_API_KEY" in done.stderr


@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_parts_need_a_redis_url(command: str) -> None:
    """Only `up` starts a server."""
    done = call_cli(command)
    assert done.returncode == 2
    assert "REDIS_URL" in done.stderr


def test_a_data_directory_needs_the_embedded_redis(tmp_path: Path) -> None:
    """Otherwise it would be unused."""
    done = call_cli("up", "--data-dir", str(tmp_path), REDIS_URL="redis://127.0.0.1:1")
    assert done.returncode == 2
    assert "--data-dir" in done.stderr


def test_an_absent_redis_is_an_error() -> None:
    """`up` with an address where nothing listens."""
    done = call_cli("up", "--port", "0", "--redis-url", "redis://127.0.0.1:1")
    assert done.returncode == 1
    assert "no Redis to work with: Redis does not answer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "status"), [("gateway", 2), ("worker", 2), ("up", 1)])
def test_a_redis_that_evicts_keys_is_an_error(command: str, status: int) -> None:
    """One sentence: what is wrong and what to set."""
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        arguments = [] if command == "worker" else ["--port", "0"]
        done = call_cli(command, *arguments, "--redis-url", server.url)
    assert done.returncode == status
    assert "maxmemory-policy is allkeys-lru; set it to noeviction" in done.stderr
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
    """With the command that installs it."""
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


@pytest.mark.parametrize("option", ["--object-store", "--data-dir"])
def test_a_folder_that_cannot_be_created_is_an_error(option: str) -> None:
    """It names the folder and the reason. No process is left running."""
    done = run_cli("up", "--port=0", option, "/dev/null/x")
    assert done.returncode in (1, 2)
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stderr


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
    """Options that are not given have the engine's defaults."""
    plain = options.engine_options(parse("worker", "--model", "m"))
    assert plain == EngineOptions(model_path="m")
    given = options.engine_options(
        parse("worker", "--model=m", "--kv-cache-gib=0.5", "--threads=3", "--max-num-seqs=7")
    )
    assert given == EngineOptions(
        model_path="m", kv_memory_bytes=2**29, num_threads=3, max_num_seqs=7
    )


def test_options_of_generating_reach_the_engine() -> None:
    """By vLLM's names."""
    given = options.engine_options(
        parse(
            "worker",
            "--model=m",
            "--generation-config=none",
            "--tool-call-parser=hermes",
            "--reasoning-parser=qwen3",
            '--default-chat-template-kwargs={"enable_thinking": false, "list": [1, {"a": null}]}',
        )
    )
    assert given == EngineOptions(
        model_path="m",
        generation_config="none",
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        chat_template_kwargs={"enable_thinking": False, "list": [1, {"a": None}]},
    )


@pytest.mark.parametrize(
    "raw", ["", "{", "[]", "1", "null", '"a"', "enable_thinking=false", '{"a": NaN}', "{'a': 1}"]
)
@pytest.mark.parametrize("command", ["up", "worker"])
def test_template_variables_are_a_json_object(
    command: str, raw: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(command, f"--default-chat-template-kwargs={raw}")
    error = capsys.readouterr().err
    assert "--default-chat-template-kwargs: must be a JSON object, as {" in error
    assert error.rstrip().endswith(f"not {raw!r}")


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


@pytest.mark.parametrize("master", ["host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_a_master_is_a_host_and_a_port(master: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("worker", f"--master={master}")
    assert f"must be HOST:PORT, not {master!r}" in capsys.readouterr().err


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


def test_a_second_node_needs_an_interpreter_but_no_redis(tmp_path: Path) -> None:
    """The error precedes any start."""
    node = ("--engine=vllm", "--nodes=2", "--node-rank=1", "--master=127.0.0.1:1")
    done = call_cli("worker", *node, f"--engine-python={tmp_path}/python")
    assert done.returncode == 2
    assert "no interpreter at" in done.stderr


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


@pytest.mark.parametrize(
    "command", ["jobs list", "keys list", "drain --worker none", "callbacks dead list"]
)
def test_operators_commands_need_a_redis(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REDIS_URL or a running `batchway up`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = call_cli(*command.split())
    assert done.returncode == 2
    assert "no Redis given" in done.stderr


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
    """In one sentence."""
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
    """In one sentence."""
    path = tmp_path / "models.yaml"
    path.write_text(text)
    done = call_cli("up", "--port=0", f"--models={path}")
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
