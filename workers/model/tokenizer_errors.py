"""Explains why a tokenizer cannot be read. The errors of transformers often name the wrong
package."""

from importlib.util import find_spec

from workers.model.checkpoint import first_line

# Packages that read a tokenizer.model, by module.
_FOR_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
_FILES = "tokenizer.json, tokenizer.model, tekken.json, vocab.txt, or vocab.json with merges.txt"


def tokenizer_refusal(model_path: str, exc: Exception) -> str:
    """One sentence for what `AutoTokenizer` has raised."""
    said = str(exc)
    if "Couldn't instantiate the backend tokenizer" in said:
        return f"{model_path} has no tokenizer: none of {_FILES}"
    if "tiktoken" in said:
        if missing := [name for module, name in _FOR_SENTENCEPIECE.items() if not _has(module)]:
            return _needs(model_path, "SentencePiece model", *missing)
        if not _has("tiktoken"):
            return _needs(model_path, "vocabulary, which is no SentencePiece model,", "tiktoken")
    if "mistral-common" in said or "mistral_common" in said:
        return _needs(model_path, "tekken.json", "mistral-common")
    if isinstance(exc, ImportError):
        return (
            f"{model_path} has no tokenizer.json, and its own tokenizer is a program that gateways "
            f"cannot run ({first_line(exc)})"
        )
    return f"{model_path} has no tokenizer that can be loaded: {first_line(exc)}"


def _needs(model_path: str, what: str, *packages: str) -> str:
    named = " ".join(packages)
    return (
        f"to read the {what} of {model_path}, the worker needs {' and '.join(packages)}: "
        f"pip install {named}"
    )


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
