"""Compares a model's weights of fewer bits with float32: python -m bench.quantization --model DIR

Runs random prompts with float32's greedy continuations through the engine's path in every type,
whatever tokens the model would choose, and compares the logits.
"""

import argparse
import sys
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from contract.jobs import SamplingParams
from infra.measure.engine import run_workload
from infra.measure.workloads import log_uniform_workload
from infra.tables import table
from workers.engine.interface import Chunk, ModelRefused
from workers.engine.sequence import Sequence
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model
from workers.model.runner import ModelRunner
from workers.profiling import shape_of

_TYPES = {
    "float32": ("float32", "none"),
    "float32, int8": ("float32", "int8"),
    "bfloat16": ("bfloat16", "none"),
    "bfloat16, int8": ("bfloat16", "int8"),
}
_KV_BYTES = 2**27
_PROMPT_TOKENS, _OUTPUT_TOKENS = (16, 128), 64
Texts = Seq[tuple[int, ...]]  # each ends with the tokens that are compared


def compare(model: str, num_texts: int, threads: int | None) -> list[list[str]]:
    """Returns a table with a row for each type. Raises ModelRefused."""
    head = ("weights", "MB a step reads", "logits off by", "divergence (nats)", "same token")
    rows = [[*head, "same text"]]
    texts: Texts = ()
    expected: list[Tensor] = []
    for name, (dtype, quantization) in _TYPES.items():
        options = EngineOptions(
            model_path=model,
            dtype=dtype,
            quantization=quantization,
            device="cpu",
            num_threads=threads,
            max_num_seqs=32,
            kv_memory_bytes=_KV_BYTES,
        )
        loaded = load_model(options, lambda text: None)
        runner = loaded.model
        if not isinstance(runner, ModelRunner):
            raise ModelRefused("only models with paged attention are compared")
        if not texts:
            workload = log_uniform_workload(
                num_texts,
                loaded.vocab_size,
                prompt_tokens=_PROMPT_TOKENS,
                output_tokens=(_OUTPUT_TOKENS,) * 2,
            )
            engine = build_engine(runner, loaded.vocab_size, options, loaded.num_step_tokens)
            run = run_workload(engine, workload)
            pairs = zip(workload.requests, run.timelines, strict=True)
            texts = [(*asked.prompt_token_ids, *found.token_ids) for asked, found in pairs]
        logits = [_logits(runner, text) for text in texts]
        expected = expected or logits
        megabytes = f"{shape_of(runner).weight_bytes / 1e6:.1f}"
        rows.append([name, megabytes, *differences(logits, expected)])
    return rows


def _logits(runner: ModelRunner, text: tuple[int, ...]) -> Tensor:
    """Logits (output tokens, vocab_size) from which each token of the output is chosen."""
    sequence = Sequence(
        job_id="text",
        epoch=1,
        choice=0,
        tenant="",
        lane="",
        token_ids=list(text),
        num_prompt=len(text),
        params=SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0),
        block_ids=list(range(-(-len(text) // runner.block_size))),
    )
    logits = runner.logits([Chunk(sequence, 0, len(text), samples=False)])
    return logits[-_OUTPUT_TOKENS:].float()


def differences(found: Seq[Tensor], expected: Seq[Tensor]) -> list[str]:
    """Compares logits (n, vocab_size) of each text with the reference's: their distance as a share
    of the reference's deviation, Kullback-Leibler divergence, and equal likeliest tokens."""
    is_same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(found, expected, strict=True)]
    logits, reference = (
        each - each.mean(-1, keepdim=True) for each in (torch.cat([*found]), torch.cat([*expected]))
    )
    distance = (logits - reference).square().mean(-1) / reference.square().mean(-1)
    own, true = logits.log_softmax(-1), reference.log_softmax(-1)
    return [
        f"{float(distance.mean()) ** 0.5:.3%}",
        f"{float((true.exp() * (true - own)).sum(-1).mean()):.6f}",
        f"{float(torch.cat(is_same).float().mean()):.3%}",
        f"{sum(bool(same.all()) for same in is_same)} of {len(is_same)}",
    ]


def main(argv: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quantization", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--texts", type=int, default=64, metavar="N")
    parser.add_argument("--threads", type=int, help="of the model (default: all cores)")
    given = parser.parse_args(argv)
    try:
        rows = compare(given.model, given.texts, given.threads)
    except ModelRefused as exc:
        print(f"bench.quantization: {exc}", file=sys.stderr)
        return 1
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
