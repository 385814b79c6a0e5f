"""Measures the effect of quantized weights: python -m bench.quantization [--model DIR]

Runs texts through the engine's path in every type, whatever tokens the model would choose, and
compares the logits with those of the reference, unquantized float32. For the demo model the texts
are exercises that it was not trained on, and answers are scored. For other models they are random
prompts with the reference's greedy continuations.
"""

import argparse
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.models import whole_chunk
from infra.demo_model import demo_model_path
from infra.measure.engine import run_workload
from infra.measure.workloads import log_uniform_workload
from infra.tables import table
from training.documents import answer_ids, prompt_ids
from training.draws import FAMILIES
from training.evaluate import held_out
from workers.engine.interface import ModelRefused
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions
from workers.model.loader import LoadedModel, load_model
from workers.model.runner import ModelRunner
from workers.profiling.demand import shape_of

_TYPES = (("float32", "none"), ("float32", "int8"), ("bfloat16", "none"), ("bfloat16", "int8"))
_KV_BYTES = 2**27
_EXERCISE_SEED = 1  # as in the demo model's card


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of a text; the first `num_given` are not scored."""

    token_ids: tuple[int, ...]
    num_given: int


@dataclass(slots=True)
class Tally:
    """The results of one type: sums over scored tokens, and counts of texts."""

    num_tokens: int = 0
    loss: float = 0.0  # nats
    divergence: float = 0.0  # from the reference's distribution, nats
    difference: float = 0.0  # mean squares relative to the variance of the reference's logits
    num_same_tokens: int = 0
    num_same_texts: int = 0  # all likeliest tokens are the reference's
    num_right_texts: int = 0  # all likeliest tokens are the text's

    def add(self, logits: Tensor, reference: Tensor, wanted: Tensor) -> None:
        """Adds a text. logits and reference (n, vocab_size), wanted (n,): its scored tokens."""
        logits, reference = _centred(logits), _centred(reference)
        own, true = logits.log_softmax(-1), reference.log_softmax(-1)
        best = logits.argmax(-1)
        is_same = best == reference.argmax(-1)
        spread = reference.square().mean(-1)
        self.num_tokens += len(wanted)
        self.loss -= float(own.gather(1, wanted[:, None]).sum())
        self.divergence += float((true.exp() * (true - own)).sum())
        self.difference += float(((logits - reference).square().mean(-1) / spread).sum())
        self.num_same_tokens += int(is_same.sum())
        self.num_same_texts += bool(is_same.all())
        self.num_right_texts += bool((best == wanted).all())


def exercises(num_each: int) -> list[Text]:
    """Draws exercises from the demo model's families, not used in training."""
    found = [e for family in FAMILIES for e in held_out(family, _EXERCISE_SEED, num_each)]
    return [
        Text((*prompt_ids(exercise), *answer_ids(exercise)), len(prompt_ids(exercise)))
        for exercise in found
    ]


def continuations(loaded: LoadedModel, options: EngineOptions, num_texts: int) -> list[Text]:
    """Draws random prompts with the model's greedy continuations."""
    workload = log_uniform_workload(
        num_texts, loaded.vocab_size, prompt_tokens=(16, 128), output_tokens=(64, 64)
    )
    engine = build_engine(loaded.model, loaded.vocab_size, options, loaded.num_step_tokens)
    run = run_workload(engine, workload)
    return [
        Text((*request.prompt_token_ids, *timeline.token_ids), len(request.prompt_token_ids))
        for request, timeline in zip(workload.requests, run.timelines, strict=True)
    ]


def logits_of(runner: ModelRunner, text: Text) -> Tensor:
    """Logits (n, vocab_size) after each token from the last given one on, except the last."""
    logits = runner.logits([whole_chunk(text.token_ids, runner.block_size, samples=False)])
    return logits[text.num_given - 1 :].float()


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def options_of(model: str, dtype: str, quantization: str, threads: int | None) -> EngineOptions:
    return EngineOptions(
        model_path=model,
        dtype=dtype,
        quantization=quantization,
        device="cpu",
        num_threads=threads,
        max_num_seqs=32,
        kv_memory_bytes=_KV_BYTES,
    )


def compare(
    model: str, num_texts: int, threads: int | None
) -> tuple[list[Text], list[tuple[str, int, Tally]]]:
    """The texts; name, bytes read per step and results of each type, first the reference's. Raises
    ModelRefused."""
    options = [options_of(model, *types, threads) for types in _TYPES]
    loaded = [load_model(each, lambda text: None) for each in options]
    if model == str(demo_model_path()):
        texts = exercises(num_texts)
    else:
        texts = continuations(loaded[0], options[0], num_texts)
    runners = [each.model for each in loaded]
    tallies = [Tally() for _ in runners]
    for text in texts:
        wanted = torch.tensor(text.token_ids[text.num_given :])
        reference: Tensor | None = None
        for runner, tally in zip(runners, tallies, strict=True):
            if not isinstance(runner, ModelRunner):
                raise ModelRefused("only models with paged attention are compared")
            logits = logits_of(runner, text)
            reference = logits if reference is None else reference
            tally.add(logits, reference, wanted)
    shapes = [shape_of(runner) for runner in runners if isinstance(runner, ModelRunner)]
    names = [f"{dtype}, int8" if quantized == "int8" else dtype for dtype, quantized in _TYPES]
    return texts, [
        (name, shape.weight_bytes, tally)
        for name, shape, tally in zip(names, shapes, tallies, strict=True)
    ]


def rows(texts: Seq[Text], found: Seq[tuple[str, int, Tally]]) -> list[tuple[str, ...]]:
    """Returns a heading, and a row for each pair of types."""
    heading = (
        "weights", "MB a step reads", "logits off by", "divergence (nats)", "loss (nats)",
        "same token", "same text", "right text",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [heading]
    for name, num_bytes, tally in found:
        n = tally.num_tokens
        lines.append(
            (
                name,
                f"{num_bytes / 1e6:.1f}",
                f"{(tally.difference / n) ** 0.5:.3%}",
                f"{tally.divergence / n:.6f}",
                f"{tally.loss / n:.4f}",
                f"{tally.num_same_tokens / n:.3%}",
                f"{tally.num_same_texts} of {len(texts)}",
                f"{tally.num_right_texts} of {len(texts)}",
            )
        )
    return lines


def main(argv: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quantization", description=__doc__)
    parser.add_argument("--model", default=str(demo_model_path()), metavar="DIR")
    parser.add_argument(
        "--texts",
        type=int,
        help="(default: 300 of each family for the demo model, else 64)",
        metavar="N",
    )
    parser.add_argument("--threads", type=int, help="of the model (default: all cores)")
    given = parser.parse_args(argv)
    is_demo = given.model == str(demo_model_path())
    try:
        texts, found = compare(given.model, given.texts or (300 if is_demo else 64), given.threads)
    except ModelRefused as exc:
        print(f"bench.quantization: {exc}", file=sys.stderr)
        return 1
    print(f"{found[0][2].num_tokens} tokens in {len(texts)} texts\n")
    print(table(rows(texts, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
