"""What vLLM compiles is kept beside the model, where this user alone may write, or in the cache."""

import os
from pathlib import Path

import pytest

from workers.vllm_engine.compile_cache import use_compile_cache

VARIABLES = {
    "VLLM_CACHE_ROOT": "",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def used(model: str | Path, environ: dict[str, str]) -> Path:
    """The folder that the libraries are told, one for all."""
    use_compile_cache(str(model), environ)
    folder = Path(environ["VLLM_CACHE_ROOT"])
    for variable, name in VARIABLES.items():
        assert Path(environ[variable]) == folder / name
    return folder


def test_it_is_beside_the_model_s_folder(model: Path, environ: dict[str, str]) -> None:
    """Not in it: code would come with a model. Nobody else may write to it. A link has that of its
    folder, and the second start finds the first one's."""
    link = model.parent.parent / "link"
    link.symlink_to(model)

    folders = {used(each, {}) for each in (model, link, f"{model}/")}

    assert folders == {model.parent / ".m.vllm"}
    assert folders.pop().stat().st_mode & 0o777 == 0o700
    assert [*model.iterdir()] == []


def test_a_model_of_the_hub_has_batchway_s_cache(environ: dict[str, str], tmp_path: Path) -> None:
    assert used("org/no-such-model", environ) == tmp_path / "cache" / "batchway" / "vllm"


@pytest.mark.parametrize("fault", ["a file", "writable by others", "of another user"])
def test_a_place_that_others_could_fill_is_not_used(
    fault: str,
    model: Path,
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Code is loaded from there."""
    place = model.parent / ".m.vllm"
    if fault == "a file":
        place.touch()
    else:
        place.mkdir()
    if fault == "writable by others":
        place.chmod(0o777)
    if fault == "of another user":
        uid = os.getuid()
        answers = iter((uid + 1, uid))
        monkeypatch.setattr(os, "getuid", lambda: next(answers))

    assert used(model, environ) == tmp_path / "cache" / "batchway" / "vllm"


def test_variables_that_are_set_stay(model: Path) -> None:
    given = {"VLLM_CACHE_ROOT": "/elsewhere"}
    use_compile_cache(str(model), given)
    assert given == {"VLLM_CACHE_ROOT": "/elsewhere"}

    one = {"TRITON_CACHE_DIR": "/t"}
    use_compile_cache(str(model), one)
    assert one["TRITON_CACHE_DIR"] == "/t"
    assert one["VLLM_CACHE_ROOT"] == str(model.parent / ".m.vllm")


def test_without_a_place_libraries_keep_their_defaults(model: Path, tmp_path: Path) -> None:
    """A file is where the cache would be."""
    (tmp_path / "cache").touch()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    use_compile_cache("org/no-such-model", environ)

    assert environ.keys() == {"XDG_CACHE_HOME"}
