"""Measures SmolLM2 on real questions: python -m bench.real_text speculation|lengths

`speculation` runs the same greedy chats with drafted tokens and without, in turns, on engines that
share the model, and compares their tokens: questions, which are answered freely, and paragraphs of
`docs`, which are to be repeated. It counts processor time of one thread, which other work on
the machine changes less than the time of a clock.

`lengths` answers each question several times, sampled, with less KV cache than the answers need.
It compares admission by known tokens, by learnt lengths and by the callers' caps, and the learnt
lengths with the real ones.

Prints tables for bench/RESULTS.md.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import mean, median

from bench.models import chat_ids
from bench.questions import PROMPTS
from bench.tables import markdown_table
from contract.jobs import SamplingParams
from workers.engine.admission_check import RecentLengths
from workers.engine.engine import Engine
from workers.engine.interface import LoadedModel
from workers.engine.sequence import Sequence, sequences_of
from workers.engine_process.engine_setup import limits_of, strategies_of
from workers.ipc.messages import EngineOptions, Request
from workers.model.gguf_cache import smollm2_folder
from workers.model.loader import load_model

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_MAX_TOKENS = 128  # of an answer, for speculation
_CAP = 384  # of an answer, for lengths: most end before it
Outputs = dict[str, list[int]]


class CallersCap(RecentLengths):
    """Predicts that each answer reaches its caller's maximum."""

    def predict(self, sequence: Sequence) -> int:
        return sequence.max_output


ADMISSIONS: Mapping[str, Callable[[], RecentLengths]] = {
    "known tokens": lambda: RecentLengths(num_needed=sys.maxsize),
    "learnt lengths": RecentLengths,
    "the callers' caps": CallersCap,
}


def paragraphs() -> list[str]:
    """Lines of `docs` that are plain sentences."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(_DOCS.glob("*.md")))
    plain = re.compile(r"^(?:- )?([A-Z][^\n`|\[*]{100,300})$", re.MULTILINE)
    return [line for page in pages for line in plain.findall(page)]


def chats_of(
    folder: Path, texts: Seq[str], *, max_tokens: int, temperature: float = 0.0
) -> list[Request]:
    """A chat for each text, each with a seed of its own."""
    return [
        Request(
            *(str(n), 1, "t", "standard"),
            prompts=(ids,),
            params=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=n),
            outputs=((),),
            finished=(False,),
        )
        for n, ids in enumerate(chat_ids(folder, texts))
    ]


def run_chats(
    engine: Engine, chats: Seq[Request], num_blocks: int = 1
) -> tuple[Outputs, dict[str, float]]:
    """All chats at once: their tokens, and sums over the steps, with the processor time."""
    outputs: Outputs = {chat.job_id: [] for chat in chats}
    sums = dict.fromkeys(("drafted", "accepted", "preemptions", "used", "steps"), 0.0)
    start_s = time.process_time()
    for chat in chats:
        engine.add(chat)
    while engine.has_work:
        report = engine.step()
        sums["drafted"] += report.num_drafted_tokens
        sums["accepted"] += report.num_accepted_tokens
        sums["preemptions"] += report.num_preemptions
        sums["used"] += 1 - report.num_free_blocks / num_blocks
        sums["steps"] += 1
        for output in report.outputs:
            outputs[output.job_id].append(output.token_id)
    return outputs, sums | {"s": time.process_time() - start_s}


def engine_of(
    loaded: LoadedModel, options: EngineOptions, lengths: RecentLengths | None = None
) -> Engine:
    limits = limits_of(options, loaded.vocab_size, loaded.num_step_tokens)
    return Engine(loaded.model, limits, strategies_of(options), lengths=lengths)


def speculation(given: argparse.Namespace) -> list[list[str]]:
    options = EngineOptions(model_path=str(given.folder), num_threads=1, kv_memory_bytes=2**29)
    loaded = load_model(options, lambda text: print(text, file=sys.stderr))
    quotes = [f"Repeat this text word for word: {text}" for text in paragraphs()]
    rows = [["chats", "at once", "off (tokens/s)", "on", "on of off", "drafted", "right",
             "equal answers"]]  # fmt: skip
    for name, texts in {"questions": PROMPTS[::-1], "paragraphs": quotes}.items():
        for num_chats in given.chats:
            chats = chats_of(given.folder, texts[:num_chats], max_tokens=_MAX_TOKENS)
            rates: dict[bool, list[float]] = {False: [], True: []}
            answers: dict[bool, Outputs] = {}
            for number in range(2 * given.rounds):
                is_on = number % 4 in (1, 2)
                engine = engine_of(loaded, EngineOptions(model_path="", speculation=is_on))
                answers[is_on], sums = run_chats(engine, chats)
                num_tokens = sum(map(len, answers[is_on].values()))
                rates[is_on].append(num_tokens / sums["s"])
                if is_on:
                    drafted, accepted = sums["drafted"] / num_tokens, sums["accepted"]
                    right = accepted / max(1, sums["drafted"])
            ratio = median(on / off for off, on in zip(rates[False], rates[True], strict=True))
            equal = sum(answers[False][chat] == answers[True][chat] for chat in answers[True])
            cells = [f"{median(rates[is_on]):,.0f}" for is_on in (False, True)]
            shares = [f"{ratio:.2f}", f"{drafted:.2f} a token", f"{right:.0%}"]
            rows.append([name, str(num_chats), *cells, *shares, f"{equal} of {num_chats}"])
    return rows


def lengths(given: argparse.Namespace) -> list[list[str]]:
    options = EngineOptions(
        model_path=str(given.folder), kv_memory_bytes=given.kv_mib * 2**20, kv_high_water=1.0
    )
    loaded = load_model(options, lambda text: print(text, file=sys.stderr))
    texts = random.Random(0).sample(PROMPTS * given.rounds, len(PROMPTS) * given.rounds)
    chats = chats_of(given.folder, texts, max_tokens=_CAP, temperature=1.0)
    rows = [["admission by", "preemptions", "mean KV occupancy", "steps"]]
    for name, make in ADMISSIONS.items():
        engine = engine_of(loaded, options, make())
        outputs, sums = run_chats(engine, chats, loaded.model.num_blocks)
        used = f"{sums['used'] / sums['steps']:.0%}"
        rows.append([name, f"{sums['preemptions']:.0f}", used, f"{sums['steps']:.0f}"])
    print(markdown_table(predictions(chats, outputs)), end="\n\n")
    return rows


def predictions(chats: Seq[Request], outputs: Outputs) -> list[list[str]]:
    """Learnt from the first half of the answers, and compared with the second half: of all their
    tokens, and of single answers before their first token and after 64."""
    learnt, half = RecentLengths(), len(chats) // 2
    for chat in chats[:half]:
        learnt.observe(_with_output(chat, outputs[chat.job_id]))
    rows = [["known", "answers", "real tokens", "predicted", "by the cap", "median error"]]
    for num_known in (0, 64):
        rest = [chat for chat in chats[half:] if len(outputs[chat.job_id]) > num_known]
        real = [len(outputs[chat.job_id]) for chat in rest]
        guesses = [
            learnt.predict(_with_output(chat, outputs[chat.job_id][:num_known], number))
            for number, chat in enumerate(rest)
        ]
        error = median(abs(a - b) / a for a, b in zip(real, guesses, strict=True))
        sums = [f"{mean(lengths):.0f}" for lengths in (real, guesses)]
        rows.append([f"{num_known} tokens", str(len(rest)), *sums, str(_CAP), f"{error:.0%}"])
    return rows


def _with_output(chat: Request, token_ids: Seq[int], arrival: int = 0) -> Sequence:
    [sequence] = sequences_of(chat, frozenset(), arrival)
    sequence.token_ids += token_ids
    return sequence


def main(arguments: Seq[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.real_text", description=__doc__)
    parser.add_argument("what", choices=("speculation", "lengths"))
    parser.add_argument("--folder", type=Path, help="a model with a chat template (default: R)")
    parser.add_argument("--chats", type=int, nargs="+", default=[1, 8, 32], help="at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-mib", type=int, default=96, help="of `lengths`")
    given = parser.parse_args(arguments)
    given.folder = given.folder or smollm2_folder()
    measured = speculation if given.what == "speculation" else lengths
    print(markdown_table(measured(given)))


if __name__ == "__main__":
    main()
