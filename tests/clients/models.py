"""The models behind the server on which clients are tried, one for each thing that is tried."""

import dataclasses
import json
from pathlib import Path

from tests.clients.agent_engine import CONTEXT_LENGTH
from tests.clients.run import AGENT, DEMO, THINKER
from tests.real.families import QWEN3
from tests.real.model_folder import write_model_folder
from tests.tiny_encoders import save_classifier, save_embedder

EMBEDDER, RERANKER = "embedder", "reranker"


def write_fleet(folder: Path) -> Path:
    """The `fleet.yaml` of the demo model, one that reasons, one that works as coding agents ask it
    to, and random ones for vectors."""
    write_model_folder(QWEN3, folder / THINKER)
    config = QWEN3.config | {"max_position_embeddings": CONTEXT_LENGTH}
    write_model_folder(dataclasses.replace(QWEN3, config=config), folder / AGENT)
    fields: dict[str, dict[str, object]] = {
        DEMO: {"model": DEMO, "kv_cache_gib": 0.25},
        THINKER: {
            "model": str(folder / THINKER),
            "engine_module": "tests.clients.thinking_engine",
        },
        AGENT: {"model": str(folder / AGENT), "engine_module": "tests.clients.agent_engine"},
        EMBEDDER: {"model": str(save_embedder("bert", folder / EMBEDDER))},
        RERANKER: {"model": str(save_classifier("bert", folder / RERANKER, num_labels=1))},
    }
    models = [{"served_model_name": name, **own} for name, own in fields.items()]
    file = folder / "fleet.yaml"
    file.write_text(json.dumps({"models": models}))  # JSON is YAML
    return file
