"""How every causal model of transformers is served: python -m bench.families [TYPE…] [--write]

Makes a tiny random model of each in the registry of the installed transformers, loads it as a
worker does and compares greedy tokens with those of `generate`. `--write` puts the table into
docs/models.md.
"""

import argparse
import contextlib
import gc
import multiprocessing
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.tables import markdown_table
from tests.tiny_families import VOCAB_SIZE
from tests.tiny_models import save_tokenizer
from tests.tiny_registry import make_tiny_model
from tests.workers.model.driver import make_prompts, make_sequence, run_to_end
from tests.workers.model.parity import NUM_OUTPUT, PROMPT_LENGTHS, Expected
from workers.engine.interface import ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model
from workers.model.runner import ModelRunner

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
BATCHED, ALONE, REFUSED, NOT_MADE = "in one batch", "one at a time", "refused", "not made tiny"
WRONG = "wrong"  # a bug: other tokens, or an exception that is no refusal
_ORDER = (BATCHED, ALONE, REFUSED, NOT_MADE)
_LIMIT_S = 180
_KV_BYTES = 2**25
_STEPS_BEFORE_PREEMPTION = 4


@dataclass(frozen=True, slots=True)
class Family:
    """How a model type is served, and why not in one batch."""

    model_type: str
    served: str
    why: str = ""


def model_types() -> dict[str, Any]:
    """The configuration class of each causal model in the registry, by model type."""
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.keys()
    return dict(sorted((each.model_type, each) for each in classes))


def try_family(model_type: str) -> Family:
    """Makes, loads and compares a tiny model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            make_tiny_model(model_types()[model_type]).save_pretrained(folder)
            save_tokenizer(folder)
        except Exception as exc:  # transformers' own, of sizes that do not fit together
            return Family(model_type, NOT_MADE, _line(exc))
        lines: list[str] = []
        try:
            options = EngineOptions(
                model_path=name,
                device="cpu",
                num_threads=1,
                max_num_seqs=8,
                kv_memory_bytes=_KV_BYTES,
            )
            model = load_model(options, lines.append).model
        except ModelRefused as exc:
            return Family(model_type, REFUSED, str(exc).replace(name, "the model"))
        except Exception:
            return Family(model_type, WRONG, traceback.format_exc())
        try:
            difference = _difference(model, _expected(folder))
        except Exception:
            return Family(model_type, WRONG, traceback.format_exc())
        if difference:
            return Family(model_type, WRONG, difference)
        if isinstance(model, ModelRunner):
            return Family(model_type, BATCHED)
        [line] = [line for line in lines if line.startswith("served one sequence at a time: ")]
        return Family(model_type, ALONE, line.partition(": ")[2])


def _expected(folder: Path) -> Expected:
    auto_class: Any = transformers.AutoModelForCausalLM
    decoder = auto_class.from_pretrained(folder)
    with contextlib.suppress(ValueError):  # a family with attention of its own
        decoder.set_attn_implementation("eager")
    prompts = make_prompts(PROMPT_LENGTHS, VOCAB_SIZE)
    settings: Any = transformers.GenerationConfig
    try:
        decoder.generation_config = settings()  # no forced tokens
        return Expected(decoder, prompts)
    except Exception:  # its cache does not work (xLSTM)
        decoder.generation_config = settings(use_cache=False)
        return Expected(decoder, prompts)


def _difference(model: Any, expected: Expected) -> str:
    """The first difference from `generate`: prompts whole, in chunks, and one preempted; or ""."""
    for way, chunk_tokens in (("whole", 1000), ("in chunks", 7), ("preempted", 7)):
        sequences = [make_sequence(each, max_tokens=NUM_OUTPUT) for each in expected.prompts]
        if way == "preempted":
            begun = [make_sequence(each, max_tokens=5) for each in expected.prompts]
            outputs = run_to_end(model, begun, 1000)
            for sequence, ids in zip(sequences, outputs, strict=True):
                sequence.token_ids += ids  # of which nothing is computed
        found = run_to_end(model, sequences, chunk_tokens)
        for number, ids in enumerate(found):
            try:
                expected.check(number, ids)
            except AssertionError as exc:
                return f"{way}, prompt of {len(expected.prompts[number])} tokens: {exc}"
    return ""


def _line(exc: BaseException) -> str:
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}"


def _answer(model_type: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(try_family(model_type))


def try_apart(model_type: str) -> Family:
    """As `try_family`, in a process of its own with a time limit."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(model_type, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(_LIMIT_S) else Family(model_type, WRONG, "too slow")
    except EOFError:
        process.join()
        return Family(model_type, WRONG, f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def table_of(families: Sequence[Family]) -> str:
    """The model types by how they are served, and why."""
    groups: dict[tuple[str, str], list[str]] = {}
    for family in families:
        groups.setdefault((family.served, _general(family.why)), []).append(family.model_type)
    ordered = sorted(groups, key=lambda group: (_ORDER.index(group[0]), -len(groups[group]), group))
    rows = [
        [
            served,
            why,
            f"{len(groups[served, why])}: " + ", ".join(map("`{}`".format, groups[served, why])),
        ]
        for served, why in ordered
    ]
    return markdown_table([["Served", "Why", "Model types"], *rows])


def _general(why: str) -> str:
    """A reason without what differs from one model to the next."""
    why = re.sub(r"^\w+(For\w+|LMHeadModel|LMHead|Attention)\b", "it", why)
    return re.sub(r" \(cosine [\d.]+\)", "", why).replace("|", "\\|")


def read_table(page: str) -> dict[str, Family]:
    """The families of a page's table, by model type."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {
        name: Family(name, row[0], row[1])
        for row in rows
        if row[0] in _ORDER
        for name in re.findall(r"`([^`]+)`", row[-1])
    }


def with_table(page: str, families: Sequence[Family]) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    version = f"With transformers {transformers.__version__}, {len(families)} model types:"
    return f"{before}{BEGIN}\n{version}\n\n{table_of(families)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="all, if none is named")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    options = parser.parse_args()
    gc.freeze()  # each load collects garbage, and to search all that is imported takes longer
    families = []
    with ThreadPoolExecutor(2) as pool:
        for family in pool.map(try_apart, options.model_types or model_types()):
            print(f"{family.model_type}: {family.served}: {family.why}", flush=True)
            families.append(family)
    is_right = not any(family.served == WRONG for family in families)
    if is_right and options.write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), families), "utf-8")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
