"""`batchway up --fleet` from end to end: two models behind one address. The hash model stands for
them where the weights do not matter; its engine is a process that starts in a tenth of the time."""

import os
import shutil
import signal
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from tests.fakes import HashModelOptions
from tests.hash_engine import HASH_MODEL_FILE
from tests.infra.processes import wait_until
from tests.infra.stack import Stack, running_fleet
from tests.infra.test_cli import run_cli

pytestmark = pytest.mark.e2e

FIELDS = "device: cpu, torch_only: true, max_num_seqs: 4, max_model_len: 64"
HASH = f"engine_module: tests.hash_engine, {FIELDS}"


def save_hash_model(folder: Path, eos_rate: float) -> Path:
    """A folder whose name is the model's, for the engine of `tests.hash_engine`."""
    folder.mkdir()
    options = HashModelOptions(eos_rate=eos_rate)
    (folder / HASH_MODEL_FILE).write_bytes(msgspec.json.encode(options))
    return folder


@pytest.fixture(scope="module")
def hash_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with different answers."""
    root = tmp_path_factory.mktemp("hash_models")
    return save_hash_model(root / "a", eos_rate=0.0), save_hash_model(root / "b", eos_rate=0.4)


def complete(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt="once", max_tokens=8, temperature=0)
    return answer.choices[0].text


def end_worker(stack: Stack, model: str, number: signal.Signals) -> None:
    os.kill(stack.pid_of(f"infra worker --model={model}"), number)


@pytest.mark.campaign
def test_two_models_behind_one_address(hash_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Each answers by its name, is listed, and counted by its name. A killed worker is replaced
    without the other model's notice. While a model has no worker, its callers are told when the
    next one is ready. Ctrl-C ends all."""
    a, b = hash_folders
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"models:\n- {{model: {a}, memory_share: 0.2, {HASH}}}\n"
        f"- {{model: {b}, memory_share: 0.2, lanes: [interactive, standard], {HASH}}}\n"
    )
    with running_fleet(file) as stack:
        assert "serves the models 'a', 'b'" in stack.wait_for("batchway is ready: ")
        stack.wait_for("is ready (2 of 2)")
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        first, other = complete(client, "a"), complete(client, "b")
        assert first != other
        assert sorted(model.id for model in client.models.list()) == ["a", "b"]
        assert httpx.get(f"{stack.url}/readyz").json()["workers"] == {"a": 1, "b": 1}
        metrics = httpx.get(f"{stack.url}/metrics").text
        assert all(f'model_name="{name}"' in metrics for name in "ab")
        shown = run_cli("top", "--url", stack.url, "--json", "-")
        assert '"a"' in shown.stdout, shown.stderr
        assert '"b"' in shown.stdout

        end_worker(stack, str(b), signal.SIGTERM)
        refusals: list[openai.APIStatusError] = []

        def is_told() -> bool:
            try:
                complete(client, "b")
            except openai.InternalServerError as refused:
                refusals.append(refused)
            return bool(refusals) and "retry-after" in refusals[-1].response.headers

        wait_until(is_told)
        assert {(each.status_code, each.code) for each in refusals} == {(503, "no_workers")}
        assert int(refusals[-1].response.headers["retry-after"]) >= 1
        assert complete(client, "a") == first
        stack.wait_for("ready model=b ", num_times=2)
        assert complete(client, "b") == other

        end_worker(stack, str(a), signal.SIGKILL)
        assert complete(client, "b") == other
        stack.wait_for("a-1 ended with signal SIGKILL")
        assert complete(client, "a") == first

        children = stack.children()
        assert stack.end() == 0
        stack.assert_left_nothing(children)


@pytest.mark.campaign
def test_a_fleet_outlives_a_model_that_cannot_be_loaded(
    hash_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its callers are told why and when it is tried again, the list and `top` show it, the other
    model serves on; once its folder is whole it serves, too."""
    a, b = hash_folders[0], tmp_path / "b"
    shutil.copytree(hash_folders[1], b)
    file_of_b = b / HASH_MODEL_FILE
    whole = file_of_b.read_bytes()
    file_of_b.write_bytes(msgspec.json.encode(HashModelOptions(refuses="half of it is missing")))
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models:\n- {{model: {a}, {HASH}}}\n- {{model: {b}, {HASH}}}\n")
    with running_fleet(file) as stack:
        assert "serves the model 'a'" in stack.wait_for("batchway is ready: ")
        stack.wait_for("model 'b' has failed: exit status 3: ")
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        first = complete(client, "a")
        wait_until(lambda: httpx.get(f"{stack.url}/v1/models/b").status_code == 200)
        with pytest.raises(openai.InternalServerError) as refused:
            complete(client, "b")
        assert (refused.value.status_code, refused.value.code) == (503, "model_failed")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        listed = httpx.get(f"{stack.url}/v1/models").json()["data"]
        failed = {model["id"]: model["failed"] for model in listed}
        assert failed["a"] is None
        assert failed["b"]["reason"].startswith("exit status 3: ")
        ready = httpx.get(f"{stack.url}/readyz", params={"model": "b"})
        assert (ready.status_code, ready.json()["reason"]) == (503, failed["b"]["reason"])
        assert httpx.get(f"{stack.url}/readyz", params={"model": "a"}).status_code == 200
        assert "b has failed: exit status 3" in run_cli("top", "--url", stack.url).stdout

        file_of_b.write_bytes(whole)
        stack.wait_for("ready model=b ")
        wait_until(lambda: httpx.get(f"{stack.url}/v1/models/b").json()["failed"] is None)
        assert complete(client, "b")
        assert complete(client, "a") == first
        assert stack.end() == 0
