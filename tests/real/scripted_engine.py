"""A real engine process with a scripted model: `python -m tests.real.scripted_engine --fd N
--options JSON`. The product's own loader reads everything of the model's folder but weights."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tokenizers import Tokenizer

from tests.real.scripted import ScriptedModel, Vocabulary
from workers.engine.interface import LoadedModel
from workers.engine_process import engine_loop as engine_process
from workers.ipc.messages import EngineOptions
from workers.model import loader
from workers.model.loaded import Loaded


def load_scripted_model(
    options: EngineOptions,
    progress: Callable[[str], None],
    kind: type[ScriptedModel] = ScriptedModel,
) -> LoadedModel:
    """Raises ModelRefused."""
    folder = Path(options.model_path)

    def runner(loaded: Loaded, progress: Callable[[str], None]) -> ScriptedModel:
        del progress
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        configuration = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        eos = configuration["eos_token"]
        ending_id = tokenizer.token_to_id(eos["content"] if isinstance(eos, dict) else eos)
        assert ending_id is not None
        vocabulary = Vocabulary(tokenizer, ending_id)
        return kind(folder, vocabulary, loaded.eos_token_ids, loaded.max_model_len)

    with mock.patch.object(loader, "_runner", runner):
        return loader.load_model(options, progress)


if __name__ == "__main__":
    sys.exit(engine_process.main(load=load_scripted_model))
