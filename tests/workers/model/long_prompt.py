"""A 32k prompt on a tiny model in its own process: prints its peak memory and first tokens.

`python -m tests.workers.model.long_prompt FOLDER NUM_TOKENS CHUNK_TOKENS`; the last line is JSON.
"""

import json
import sys
from pathlib import Path

import torch

from tests.workers.model.driver import make_prompts, make_sequence, run_to_end
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model


def peak_kib() -> int:
    """Peak memory of this process alone; `getrusage` starts at its parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main(folder: str, num_tokens: int, chunk_tokens: int) -> None:
    torch.set_num_threads(1)
    options = EngineOptions(model_path=folder, device="cpu", max_num_seqs=1)
    model = load_model(options, lambda text: None).model
    [prompt] = make_prompts([num_tokens], 320)
    run_to_end(model, [make_sequence(prompt[:64], max_tokens=2)], chunk_tokens)
    before = peak_kib()
    [output_ids] = run_to_end(model, [make_sequence(prompt, max_tokens=2)], chunk_tokens)
    grown_mib = (peak_kib() - before) / 1024
    print(json.dumps({"grown_mib": grown_mib, "output_ids": output_ids}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
