"""A real engine process with the hash model: `python -m tests.hash_engine --fd N --options JSON`.

Takes the options of `workers.engine_process.engine_loop`. The model's options are JSON in the
variable HASH_MODEL, which the supervisor's children inherit, or in the file `hash.json` of the
model's folder, if there is one: so models of a fleet differ, and change between two starts.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec

from tests.fakes import VOCAB_SIZE, HashModel, HashModelOptions, hash_tokenizer
from workers.engine.interface import Chunk, LoadedModel, ModelRefused, Padding, Row
from workers.engine.masks import StepMasks
from workers.engine_process import engine_loop as engine_process
from workers.ipc.messages import EngineOptions

HASH_MODEL_VARIABLE = "HASH_MODEL"
HASH_MODEL_FILE = "hash.json"


class SlowHashModel(HashModel):
    """A step takes at least `step_s` of wall-clock time, so that faults can occur during it."""

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        time.sleep(self.options.step_s)
        if any(self.options.hang_id in chunk.sequence.token_ids for chunk in chunks):
            threading.Event().wait()
        return super().run(chunks, padding, masks)


def load_hash_model(options: EngineOptions, progress: Callable[[str], None]) -> LoadedModel:
    """Raises ModelRefused if the hash model's options say so."""
    file = Path(options.model_path, HASH_MODEL_FILE)
    said = file.read_bytes() if file.exists() else os.environ.get(HASH_MODEL_VARIABLE, "{}")
    model_options = msgspec.json.decode(said, type=HashModelOptions)
    progress("loading the hash model")
    if model_options.refuses is not None:
        raise ModelRefused(model_options.refuses)
    if model_options.load_fifo is not None:
        with open(model_options.load_fifo):
            pass
    model = SlowHashModel(model_options)
    return LoadedModel(
        model,
        model.max_model_len,
        VOCAB_SIZE,
        tuple(model.eos_token_ids),
        hash_tokenizer(),
        resume="exact",
    )


if __name__ == "__main__":
    sys.exit(engine_process.main(load=load_hash_model))
