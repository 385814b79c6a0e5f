"""vLLM is told how vectors are made by the folder's own files; what it lacks is refused with the
reason. Needs no vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.engine.interface import ModelRefused
from workers.model.pooling.folder import read_folder
from workers.vllm_engine.pooling_arguments import config_overrides, pooling_arguments

_CLASSIFIER = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
_ENCODER = {"architectures": ["BertModel"], "model_type": "bert"}
_MODULE = "sentence_transformers.models."


def save(folder: Path, config: dict[str, Any], *modules: tuple[str, dict[str, Any]]) -> Path:
    """A folder with config.json, and modules.json if there are modules behind the Transformer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()  # not read here
    listed = [{"type": f"{_MODULE}Transformer", "path": ""}]
    for number, (name, settings) in enumerate(modules, 1):
        path = folder / f"{number}_{name}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(settings))
        listed.append({"type": f"{_MODULE}{name}", "path": path.name})
    if modules:
        (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def pooling(mode: Any) -> tuple[str, dict[str, Any]]:
    return "Pooling", {"pooling_mode": mode}


def arguments_of(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    found = read_folder(str(folder))
    assert found is not None
    return pooling_arguments(found), config_overrides(found)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([pooling("mean")], "MEAN"),
        ([pooling("cls")], "CLS"),
        ([pooling("lasttoken")], "LAST"),
        ([pooling(["mean"])], "MEAN"),
        ([("Pooling", {"pooling_mode_cls_token": True})], "CLS"),
        ([("Pooling", {})], "MEAN"),
        ([pooling("mean"), ("Normalize", {})], "MEAN"),
        ([pooling("cls"), ("Dense", {"in_features": 8, "out_features": 4})], "CLS"),
    ],
)
def test_the_pooling_is_that_of_the_folder(
    modules: list[tuple[str, dict[str, Any]]], expected: str, tmp_path: Path
) -> None:
    """vLLM neither normalises nor applies an activation: batchway does."""
    arguments, overrides = arguments_of(save(tmp_path / "m", _ENCODER, *modules))

    pooler = json.loads(arguments.pop("pooler_config"))
    assert pooler == {"use_activation": False, "seq_pooling_type": expected}
    assert arguments == {"runner": "pooling"}
    assert overrides == {}


def test_a_classifier_has_the_pooling_of_its_family(tmp_path: Path) -> None:
    arguments, overrides = arguments_of(save(tmp_path / "m", _CLASSIFIER))

    assert json.loads(arguments["pooler_config"]) == {"use_activation": False}
    assert overrides == {}


_DENSE = {"in_features": 8, "out_features": 8, "use_residual": True}


@pytest.mark.parametrize(
    ("config", "modules", "reason"),
    [
        (_ENCODER, [pooling("max")], "the pooling max"),
        (_ENCODER, [pooling("mean_sqrt_len_tokens")], "the pooling mean_sqrt_len_tokens"),
        (_ENCODER, [pooling("weightedmean")], "the pooling weightedmean"),
        (_ENCODER, [pooling(["cls", "mean"])], "the pooling cls with mean"),
        (_ENCODER, [pooling("mean"), ("Dense", _DENSE)], "a Dense that adds its input"),
    ],
)
def test_what_vllm_does_not_compute_is_refused(
    config: dict[str, Any],
    modules: list[tuple[str, dict[str, Any]]],
    reason: str,
    tmp_path: Path,
) -> None:
    folder = save(tmp_path / "m", config, *modules)

    with pytest.raises(ModelRefused) as refused:
        arguments_of(folder)

    sentence = f"{folder} has {reason}, which vLLM does not compute: serve it by --engine own"
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"position_embedding_type": "absolute"}),
        ({"position_embedding_type": "rotary"}, {"position_embedding_type": "rotary"}),
    ],
)
def test_vllm_reads_what_transformers_no_longer_writes(
    config: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    config = {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", **config}

    _, overrides = arguments_of(save(tmp_path / "m", config, pooling("cls")))

    assert overrides == expected
