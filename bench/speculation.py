"""Measures drafted tokens: python -m bench.speculation --model DIR

Runs the same streams with and without speculation, in turns, on engines that share one model, and
compares their tokens. `repetitive`: a bias makes the output one token over and over. `misleading`:
a bias leaves four tokens, drawn at random, so that there is always a draft and it is mostly wrong.
`free`: sampled without a bias, so that there is hardly a draft.

Counts processor time, which other work on the machine changes less than the time of a clock.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence as Seq

from contract.jobs import SamplingParams
from infra.tables import markdown_table
from workers.engine_process.engine_setup import build_engine
from workers.ipc.jobs import Request
from workers.ipc.messages import EngineOptions
from workers.model.loader import LoadedModel, load_model

KINDS = {
    "repetitive": {"temperature": 0.0, "logit_bias": {4: 100.0}},
    "misleading": {"temperature": 100.0, "logit_bias": dict.fromkeys(range(4, 8), 10000.0)},
    "free": {"temperature": 1.0},
}
Tokens = dict[str, list[int]]


def run(
    loaded: LoadedModel, options: EngineOptions, kind: str, num_streams: int, num_output: int
) -> tuple[Tokens, float, float]:
    """Returns the tokens, output tokens per second of processor time, and the share of drafted
    tokens that were right."""
    engine = build_engine(loaded.model, loaded.vocab_size, options, loaded.num_step_tokens)
    for number in range(num_streams):
        prompt = tuple(8 + (7919 * number + 31 * i * i) % 240 for i in range(128))
        params = SamplingParams(max_tokens=num_output, seed=number, ignore_eos=True, **KINDS[kind])  # type: ignore[arg-type]
        engine.add(Request(str(number), 1, "t", "standard", (prompt,), params, ((),), (False,)))
    tokens: Tokens = {}
    num_drafted = num_accepted = 0
    start_s = time.process_time()
    while engine.has_work:
        report = engine.step()
        num_drafted += report.num_drafted_tokens
        num_accepted += report.num_accepted_tokens
        for output in report.outputs:
            tokens.setdefault(output.job_id, []).append(output.token_id)
    seconds = time.process_time() - start_s
    return tokens, num_streams * num_output / seconds, num_accepted / max(1, num_drafted)


def main(argv: Seq[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 8, 32), metavar="N")
    parser.add_argument("--output-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    kept = EngineOptions(
        model_path=given.model,
        dtype=given.dtype,
        num_threads=given.threads,
        kv_memory_bytes=2**30,
    )
    loaded = load_model(kept, lambda text: print(text, file=sys.stderr))
    rows = [["output", "streams", "off (tokens/s)", "on", "on of off", "right", "equal outputs"]]
    for kind in KINDS:
        for num_streams in given.streams:
            found: dict[bool, list[tuple[Tokens, float, float]]] = {False: [], True: []}
            for number in range(given.rounds):
                for speculates in (False, True) if number % 2 == 0 else (True, False):
                    options = EngineOptions(model_path="", speculation=speculates)
                    result = run(loaded, options, kind, num_streams, given.output_tokens)
                    found[speculates].append(result)
            off, on = (statistics.median(r[1] for r in found[way]) for way in (False, True))
            one, other = found[False][0][0], found[True][0][0]
            num_equal = sum(one[job] == other[job] for job in one)
            pairs = zip(found[False], found[True], strict=True)
            ratio = statistics.median(with_drafts[1] / plain[1] for plain, with_drafts in pairs)
            figures = [f"{off:,.0f}", f"{on:,.0f}", f"{ratio:.2f}", f"{found[True][0][2]:.0%}"]
            rows.append([kind, str(num_streams), *figures, f"{num_equal} of {num_streams}"])
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
