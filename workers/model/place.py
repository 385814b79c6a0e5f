"""Checks where a model is. Imports no transformers, so that commands can check quickly."""

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError

from workers.engine.model import ModelRefused


def check_place(model_path: str) -> None:
    """Refuses local paths without a model. Names such as `org/model` belong to the Hub."""
    path = Path(model_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            reason = "it is no model folder"
            if (path / "modules.json").is_file():
                reason = "batchway reads a Transformer from the model's own folder, no sub-folder"
            raise ModelRefused(f"{model_path} holds no config.json: {reason}")
        if not any(path.glob("*.safetensors")):
            is_pickle = any(path.glob("*.bin")) or any(path.glob("*.pt*"))
            reason = " (pickled weights can run code and are never loaded)" if is_pickle else ""
            raise ModelRefused(f"{model_path} holds no weights in safetensors format{reason}")
    elif path.exists():
        raise ModelRefused(f"{model_path} is a file; the model's folder is wanted")
    elif model_path.startswith(("/", ".", "~")) or model_path.count("/") > 1:
        raise ModelRefused(f"there is no folder {model_path}")


def check_on_hub(model_path: str) -> None:
    """Fetches the configuration of a Hub model, or finds it in the cache; refuses unknown
    models.
    """
    if Path(model_path).expanduser().is_dir():
        return
    try:
        hf_hub_download(model_path, "config.json")
    except RemoteEntryNotFoundError as exc:
        raise ModelRefused(f"{model_path} has no config.json outside of sub-folders") from exc
    except (OSError, ValueError) as exc:
        raise ModelRefused(
            f"there is no folder {model_path}, and the Hugging Face Hub gives no such model "
            f"(unknown, private, or out of reach): {str(exc).strip().splitlines()[0]}"
        ) from exc
