"""Measures what grammars cost: python -m bench.grammar --folder DIR [--rounds 3]

First the masks of a step alone, for 32 choices and a vocabulary of 150,000 tokens; then the engine
with 32 free and with 32 constrained choices, in turns, on model M of bench.models, saved in the
folder. The constrained ones write a JSON string that is longer than the output, so that all have as
many tokens and none is forced. Last the gaps between the tokens of a plain stream, whose
neighbour is constrained: alone, and while the engine compiles eight grammars of another tenant that
take about a second each.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path

from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.models import SIZES, make_model
from contract.jobs import SamplingParams
from gateway.grammars.compiled import Kind, compile_grammar
from infra.tables import table, write
from workers.engine.engine import Engine
from workers.engine.grammar import Grammars
from workers.engine_process.engine_setup import build_engine
from workers.ipc.jobs import Request
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model

NUM_CHOICES = 32
NUM_TOKENS = 128
VOCAB_SIZE = 150_000
NUM_COMPILED = 8
NUM_PATTERNS = 300  # of a grammar that is slow to compile
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 8},
        "note": {"type": "string", "maxLength": 200},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}


def make_tokenizer(vocab_size: int, seed: int = 0) -> str:
    """A byte-level tokenizer of random words, as tokenizer.json; the last token ends an output."""
    draw = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(alphabet)
    letters = [c for c in alphabet if c.isascii() and c.isalnum()] + ["Ġ", ",", '"', ":", "}", "]"]
    while len(words) < vocab_size - 1:
        words["".join(draw.choices(letters, k=draw.randint(2, 9)))] = None
    vocabulary = {word: i for i, word in enumerate([*words, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return str(tokenizer.to_str())


def time_masks(seed: int = 0) -> list[float]:
    """Returns the seconds of each step's masks; every choice has a different output."""
    draw = random.Random(seed)
    grammars = Grammars(make_tokenizer(VOCAB_SIZE), VOCAB_SIZE, [VOCAB_SIZE - 1])
    grammar = compile_grammar(Kind.JSON_SCHEMA, SCHEMA)
    matchers = [grammars.matcher(grammar) for _ in range(NUM_CHOICES)]
    times_s: list[float] = []
    while len(times_s) < NUM_TOKENS:
        for i, matcher in enumerate(matchers):
            for token_id in matcher.forced():
                matcher.consume(token_id)
            if matcher.is_complete:
                matchers[i] = grammars.matcher(grammar)
        started_s = time.perf_counter()
        forbidden = grammars.forbidden(matchers)
        times_s.append(time.perf_counter() - started_s)
        for matcher, row in zip(matchers, forbidden, strict=True):
            allowed = (~row).nonzero()[0]
            matcher.consume(int(allowed[draw.randrange(len(allowed))]))
    return times_s


def tokens_per_s(engine: Engine, grammar: str) -> float:
    """The throughput of 32 choices that start together; a grammar of '' means unconstrained."""
    for number in range(NUM_CHOICES):
        add_choice(engine, number, grammar)
    num_tokens, started_s = 0, time.perf_counter()
    while engine.has_work:
        report = engine.step()
        assert not report.failed
        num_tokens += len(report.outputs)
    engine.evict_cache()
    return num_tokens / (time.perf_counter() - started_s)


def p99(values: Seq[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def add_choice(engine: Engine, number: int, grammar: str, tenant: str = "") -> None:
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        seed=number,
        temperature=0.0,
        ignore_eos=not grammar,
        grammar=grammar,
    )
    prompt_ids = tuple(4 + (7919 * number + 31 * i) % 200 for i in range(16))
    engine.add(Request(str(number), 1, tenant, "", (prompt_ids,), params, ((),), (False,)))


def slow_grammar(number: int) -> str:
    names = [f"^k{number}_{i}_[a-z]+$" for i in range(NUM_PATTERNS)]
    schema = {"type": "object", "patternProperties": {name: {"type": "null"} for name in names}}
    return LLMatcher.grammar_from_json_schema(schema | {"additionalProperties": False})


def gaps_ms(engine: Engine, grammar: str, compiled: Seq[str] = ()) -> list[float]:
    """The gaps between the tokens of a plain stream, beside a constrained one and compilations."""
    add_choice(engine, 0, "")
    add_choice(engine, 1, grammar, "constrained")
    for number, slow in enumerate(compiled, start=2):
        add_choice(engine, number, slow, "slow")
    times_s: list[float] = []
    while len(times_s) < NUM_TOKENS:
        if any(output.job_id == "0" for output in engine.step().outputs):
            times_s.append(time.perf_counter())
    for number in range(2 + len(compiled)):
        engine.stop_job(str(number), 1)
    engine.evict_cache()
    return [1000 * (end - start) for start, end in itertools.pairwise(times_s)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.grammar", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="the model; created if it is missing"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="M")
    parser.add_argument("--json", metavar="FILE", help="also write the figures; -: print them")
    arguments = parser.parse_args(argv)
    masks_ms = [1000 * one for one in time_masks()]
    folder = arguments.folder / arguments.size
    if not (folder / "config.json").exists():
        make_model(arguments.size, folder)
    options = EngineOptions(model_path=str(folder))
    loaded = load_model(options, lambda text: print(text, file=sys.stderr))
    grammars = Grammars(loaded.tokenizer.tokenizer_json, loaded.vocab_size, loaded.eos_token_ids)
    engine = build_engine(loaded.model, loaded.vocab_size, options, grammars=grammars)
    length = {"minLength": 10 * NUM_TOKENS, "maxLength": 20 * NUM_TOKENS}
    constrained = compile_grammar(Kind.JSON_SCHEMA, {"type": "string", **length})
    rates: dict[str, list[float]] = {"": [], constrained: []}
    for _ in range(arguments.rounds + 1):
        for grammar, found in rates.items():
            found.append(tokens_per_s(engine, grammar))
    free, bound = (statistics.median(found[1:]) for found in rates.values())  # the first warms up
    gaps: dict[str, list[float]] = {"alone": [], "beside": []}
    for number in range(arguments.rounds):
        numbers = range(number * NUM_COMPILED, (number + 1) * NUM_COMPILED)
        gaps["alone"] += gaps_ms(engine, constrained)
        gaps["beside"] += gaps_ms(engine, constrained, [slow_grammar(one) for one in numbers])
    figures = {
        "mask_p50_ms": statistics.median(masks_ms),
        "mask_p99_ms": p99(masks_ms),
        "free_tokens_per_s": free,
        "constrained_tokens_per_s": bound,
        "ratio": bound / free,
    }
    for name, found in gaps.items():
        figures |= {
            f"gap_{name}_p50_ms": statistics.median(found),
            f"gap_{name}_p99_ms": p99(found),
            f"gap_{name}_max_ms": max(found),
        }
    rows = [[name, f"{value:.2f}"] for name, value in figures.items()]
    write(figures, table([["figure", "value"], *rows]), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
