"""Writes models.yaml files, and makes cards of the models that they name."""

import json
from pathlib import Path
from typing import Any

from contract.model_cards import ModelCard, PoolingCard

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def write(folder: Path, **flows: Any) -> Path:
    """A file with flows by name."""
    path = folder / "models.yaml"
    # JSON is YAML; safe_dump would write aliases of what is there twice.
    path.write_text(json.dumps({"models": [{"name": n} | f for n, f in flows.items()]}))
    return path


def route(*models: str, **fields: Any) -> dict[str, Any]:
    """To these models in equal parts, where no rule in `fields` holds."""
    return {"route": {"otherwise": [{"model": model} for model in models], **fields}}


def rule(model: str, **when: Any) -> dict[str, Any]:
    return {"when": when, "to": [{"model": model}]}


def cascade(*models: str, threshold: float = 0.5, **fields: Any) -> dict[str, Any]:
    *first, last = models
    sure = [{"model": model, "threshold": threshold} for model in first]
    return {"cascade": {"members": [*sure, {"model": last}], **fields}}


def ensemble(combine: str, *models: str, **fields: Any) -> dict[str, Any]:
    return {"ensemble": {"members": list(models), "combine": combine, **fields}}


def pipeline(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"pipeline": {"steps": list(steps)}}


def step(name: str, model: str, endpoint: str, **body: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "endpoint": endpoint, "body": body}


def user(text: str) -> list[dict[str, str]]:
    """The messages of a chat with one text."""
    return [{"role": "user", "content": text}]


def card(name: str, pooling: PoolingCard | None = None) -> ModelCard:
    return ModelCard(
        name=name,
        context_length=512,
        vocab_size=300,
        eos_token_ids=(0,),
        tokenizer_sha256="0" * 64,
        created_s=0,
        pooling=pooling,
    )


CARDS = {
    one.name: one
    for one in (
        card("small"),
        card("large"),
        card("embed", PoolingCard(kind="embedding", num_outputs=64)),
        card("embed-wide", PoolingCard(kind="embedding", num_outputs=128)),
        card("rank", PoolingCard(kind="reranker", num_outputs=1)),
        card("intent", PoolingCard(kind="classifier", num_outputs=2, labels=("ask", "chat"))),
        card("mood", PoolingCard(kind="classifier", num_outputs=2, labels=("good", "bad"))),
    )
}
"""Served models, by name."""
