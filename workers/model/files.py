"""Reads the small files of a model's folder or Hub repository. Runs none of its code."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from workers.engine.interface import ModelRefused

DEFAULT_REVISION = "main"
_MAX_JSON_BYTES = 64 * 2**20


class ModelFiles:
    def __init__(self, model_path: str, revision: str) -> None:
        self.model_path = model_path
        self.revision = revision
        self.folder = Path(model_path).expanduser()

    @property
    def is_local(self) -> bool:
        """Whether `folder` holds the model; else the Hub does."""
        return self.folder.is_dir()

    def find(self, name: str) -> Path | None:
        """The file of that name, fetched if the model is on the Hub; None if it has none. Raises
        ModelRefused for a name that leads out of the folder, and if the Hub does not answer."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ModelRefused(f"modules.json of {self.model_path} names a path outside the model")
        if self.is_local:
            file = self.folder / path
            return file if file.is_file() else None
        try:
            return Path(hf_hub_download(self.model_path, str(path), revision=self.revision))
        except LocalEntryNotFoundError as exc:
            if self._is_known_to_lack(str(path)):
                return None
            raise self._unknown(name, exc) from exc
        except EntryNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            raise self._unknown(name, exc) from exc

    def _is_known_to_lack(self, name: str) -> bool:
        """Whether the cache shows that the model has no such file, as the Hub is out of reach."""
        found, listing = (
            try_to_load_from_cache(self.model_path, each, revision=self.revision)
            # Each model has this file, which only a download of all files puts into the cache.
            for each in (name, ".gitattributes")
        )
        # A path: the file is there. None: nothing is known. Else the Hub has said that it has none.
        return (found is not None and not isinstance(found, str)) or isinstance(listing, str)

    def _unknown(self, name: str, exc: Exception) -> ModelRefused:
        return ModelRefused(
            f"there is no folder {self.model_path}, and the Hugging Face Hub gives no such model "
            f"or revision (unknown, private, or out of reach), nor tells whether such a "
            f"model has {name}: " + str(exc).strip().partition("\n")[0]
        )

    def read_json(self, name: str) -> Any:
        """The value in the file; None without the file. Raises ModelRefused."""
        file = self.find(name)
        if file is None:
            return None
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ModelRefused(f"{name} of {self.model_path} is over {_MAX_JSON_BYTES} bytes long")
        try:
            return json.loads(file.read_bytes())
        except (ValueError, RecursionError) as exc:  # UnicodeDecodeError is a ValueError
            reason = "nests too deeply" if isinstance(exc, RecursionError) else "is damaged"
            raise ModelRefused(
                f"{name} of {self.model_path} cannot be read as JSON: it {reason}"
            ) from exc

    def read_object(self, name: str) -> dict[str, Any]:
        """As `read_json`, for a JSON object; empty without the file. Raises ModelRefused."""
        value = self.read_json(name)
        if value is None and self.find(name) is None:
            return {}
        if not isinstance(value, dict):
            raise ModelRefused(f"{name} of {self.model_path} is no JSON object")
        return value
