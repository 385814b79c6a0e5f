"""Tokens/s of models with states beside the KV, in one batch and one sequence at a time:
python -m bench.hybrids

Random models with the layers of published small ones, but fewer, in float32 on this processor, by
batchway's engine in this process. Each line is the median of runs that take turns; the prompts are
the same, and each stream ends after the same number of tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.models import save_tokenizer
from bench.tables import markdown_table
from contract.jobs import SamplingParams
from workers.engine.interface import Model
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, Request
from workers.model.loader import load_model
from workers.model.sequential import SequentialRunner, choose_continuation
from workers.model.weights import use_own_attention

VOCAB_SIZE = 32_000
NUM_STREAMS = 32
_HEAD = (
    *("shape of", "parameters", "32, one at a time", "32 in one batch", "ratio", "1 stream"),
    "same tokens",
)
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_MAMBA: Mapping[str, Any] = {"mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4}
# By model type; widths, heads and states of the published model, and eight layers.
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen3.5-0.8B": (
        "qwen3_5_text",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        },
    ),
    "LFM2-350M": (
        "lfm2",
        {
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
        },
    ),
    "Granite-4.0-H-350M": (
        "granitemoehybrid",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "num_hidden_layers": 8,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "layer_types": [*["mamba"] * 3, "attention"] * 2,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            **_MAMBA,
        },
    ),
    "Falcon-H1-0.5B": (
        "falcon_h1",
        {
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            **_MAMBA,
        },
    ),
}


def save(name: str, folder: Path) -> int:
    """Saves the random model; returns its number of parameters."""
    model_type, sizes = SHAPES[name]
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(model_type, **_COMMON, **sizes))
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return sum(each.numel() for each in model.parameters())


def run(
    model: Model, options: EngineOptions, num_streams: int, num_tokens: int
) -> tuple[float, int]:
    """Tokens/s of `num_streams` at once, from the first step without a prompt of 16 tokens on, and
    a digest of all their tokens."""
    engine = build_engine(model, VOCAB_SIZE, options)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=0, ignore_eos=True)
    for number in range(num_streams):
        prompt = tuple((position * 7919 + number * 104_729) % VOCAB_SIZE for position in range(16))
        engine.add(Request(str(number), 1, "t", "standard", (prompt,), params, ((),), (False,)))
    found: list[tuple[str, int, int]] = []
    start_s, num_before = 0.0, 0
    while engine.has_work:
        report = engine.step()
        found += [(out.job_id, out.position, out.token_id) for out in report.outputs]
        if not start_s and report.num_waiting == 0 and len(found) >= num_streams:
            start_s, num_before = time.perf_counter(), len(found)
    taken_s = time.perf_counter() - start_s
    return (len(found) - num_before) / taken_s, hash(tuple(sorted(found)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of each stream")
    args = parser.parse_args()
    rows = []
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            num_parameters = save(name, Path(folder))
            options = EngineOptions(
                model_path=folder, device="cpu", max_num_seqs=NUM_STREAMS, prefix_caching=False
            )
            batched = load_model(options, lambda line: print(f"  {line}", flush=True)).model
            alone = _alone(folder, options)
        found: dict[str, list[float]] = {"batch": [], "alone": [], "one": []}
        digests = set[int]()
        for _ in range(args.rounds):
            for key, model, num_streams in (
                ("batch", batched, NUM_STREAMS),
                ("alone", alone, NUM_STREAMS),
                ("one", batched, 1),
            ):
                speed, digest = run(model, options, num_streams, args.tokens)
                found[key].append(speed)
                digests |= {digest} if num_streams > 1 else set()
                print(f"{name} {key}: {speed:.1f} tokens/s", flush=True)
        batch, before, one = (statistics.median(found[key]) for key in ("batch", "alone", "one"))
        rows.append(
            [
                name,
                f"{num_parameters / 1e6:.0f} M",
                *(f"{speed:.1f}" for speed in (before, batch, batch / before, one)),
                "yes" if len(digests) == 1 else "no",
            ]
        )
    print(markdown_table([_HEAD, *rows]))


def _alone(folder: str, options: EngineOptions) -> SequentialRunner:
    """The same model as it is served if its sequences cannot share a batch."""
    auto: Any = AutoModelForCausalLM
    decoder = auto.from_pretrained(folder).eval()
    use_own_attention(decoder)
    device = torch.device("cpu")
    return SequentialRunner(
        decoder,
        choose_continuation(decoder, decoder.config, device),
        num_blocks=4096,
        block_size=16,
        eos_token_ids=frozenset(),
        max_model_len=2048,
        device=device,
    )


if __name__ == "__main__":
    main()
