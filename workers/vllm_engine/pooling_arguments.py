"""Tells vLLM how a folder's vectors are made, or why it cannot make them. Imports no vLLM."""

import json
from typing import Any

from tokenizers import Tokenizer

from workers.engine.interface import ModelRefused
from workers.model.pooling.folder import Dense, LogitScore, Pool, PoolingFolder
from workers.model.tokenizer import read_tokenizer

_POOLINGS = {("cls",): "CLS", ("mean",): "MEAN", ("lasttoken",): "LAST"}  # by vLLM's names


def pooling_arguments(found: PoolingFolder) -> dict[str, str]:
    """vLLM's arguments for the folder's steps. Raises ModelRefused for steps that it lacks."""
    first, *others = found.steps
    lacking, pooler = "", dict[str, Any](use_activation=False)
    if not isinstance(first, Pool):
        lacking = "steps behind its scores" if others else ""
    elif first.modes in _POOLINGS:
        pooler["seq_pooling_type"] = _POOLINGS[first.modes]
    else:
        lacking = f"the pooling {' with '.join(first.modes)}"
    if any(isinstance(step, Dense) and step.adds_input for step in others):
        lacking = "a Dense that adds its input"
    if lacking:
        raise ModelRefused(
            f"{found.files.model_path} has {lacking}, which vLLM does not compute: serve it by "
            "--engine own"
        )
    return {"runner": "pooling", "pooler_config": json.dumps(pooler)}


def config_overrides(found: PoolingFolder) -> dict[str, Any]:
    """What vLLM must read in config.json: a decoder with a LogitScore is a classifier whose weights
    are those of tokens; and what it expects there and transformers 5 no longer writes."""
    step, files = found.steps[0], found.files
    raw = files.read_object("config.json")
    overrides = (
        {"position_embedding_type": "absolute"} if raw["model_type"] == "xlm-roberta" else {}
    )
    if not isinstance(step, LogitScore):
        return overrides | {name: raw[name] for name in overrides if name in raw}
    ids = [step.true_id] if step.false_id is None else [step.false_id, step.true_id]
    tokenizer = Tokenizer.from_str(read_tokenizer(files.model_path, files.revision).tokenizer_json)
    [name] = raw["architectures"]
    return {
        "architectures": [name.replace("ForCausalLM", "ForSequenceClassification")],
        "classifier_from_token": [tokenizer.id_to_token(token_id) for token_id in ids],
        "method": "no_post_processing" if step.false_id is None else "from_2_way_softmax",
    }
