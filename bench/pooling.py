"""Compares embeddings of the engine with sentence-transformers': python -m bench.pooling

Both take the same random weights, texts of mixed lengths and threads, in one process and in turn,
and both tokenise. With `--infinity PYTHON`, an interpreter that has infinity-emb, that comes third.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from contract.jobs import Pooling, SamplingParams
from gateway.models.tokens import ModelTokenizer
from infra.tables import table
from workers.engine_process.engine_setup import build_engine
from workers.ipc.jobs import Request
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model

SIZES: Mapping[str, tuple[int, int, int]] = {  # hidden size, layers, heads
    "minilm": (384, 6, 12),
    "bert-base": (768, 12, 12),
}
_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
_LENGTHS = (4, 256)  # tokens, log-uniform
_VOCAB_SIZE = 30_522

Vectors = npt.NDArray[np.float32]
Embed = Callable[[Seq[str]], Vectors]

_INFINITY = """
import json, os, sys, time
import torch
torch.set_num_threads(int(sys.argv[2]))
from infinity_emb import EngineArgs, SyncEngineArray
array = SyncEngineArray.from_args([EngineArgs(
    model_name_or_path=sys.argv[1], engine="torch", device="cpu", dtype="float32",
    bettertransformer=False, model_warmup=False)])
for line in sys.stdin:
    texts = json.loads(line)
    start = time.perf_counter()
    vectors, _ = array.embed(model=sys.argv[1], sentences=texts).result()
    took = time.perf_counter() - start
    print("@" + json.dumps([took, [v.tolist() for v in vectors]]), flush=True)
os._exit(0)  # its threads would go on
"""


def save_model(size: str, folder: Path) -> Path:
    """A random BERT with mean pooling, in sentence-transformers' format; a character is a token."""
    hidden_size, num_layers, num_heads = SIZES[size]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=4 * hidden_size,
    )
    BertModel(config).save_pretrained(folder)
    vocabulary = {name: index for index, name in enumerate(_SPECIAL)}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[char] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer_class: Any = PreTrainedTokenizerFast
    names = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token"), _SPECIAL, strict=True))
    tokenizer_class(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(
        folder
    )
    # infinity-emb has transformers 4, which does not know the class that transformers 5 names.
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }
    settings_file.write_text(json.dumps(settings))
    package = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{package}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{package}.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def make_texts(number: int, seed: int) -> list[str]:
    """Draws random letters; lengths are log-uniform."""
    random = np.random.default_rng(seed)
    least, most = np.log(_LENGTHS)
    lengths = np.exp(random.uniform(least, most, number)).astype(int) - 2
    return ["".join(map(chr, random.integers(97, 123, length))) for length in lengths]


def engine_of(folder: Path, num_step_tokens: int | None) -> Embed:
    """The worker's engine: one job with all texts, tokenised as a gateway does, run to its end."""
    options = EngineOptions(
        model_path=str(folder), device="cpu", max_num_batched_tokens=num_step_tokens
    )
    loaded = load_model(options, lambda text: print(text, file=sys.stderr))
    engine = build_engine(
        loaded.model, loaded.vocab_size, options, loaded.num_step_tokens, prefill_only=True
    )
    tokenizer = ModelTokenizer("", loaded.tokenizer)

    def embed(texts: Seq[str]) -> Vectors:
        prompts = tuple(map(tuple, tokenizer.encode_texts(texts)))
        params, num = SamplingParams(max_tokens=0, seed=0), len(prompts)
        outputs, finished = ((),) * num, (False,) * num
        engine.add(
            Request("job", 1, "", "scoring", prompts, params, outputs, finished, pooling=Pooling())
        )
        found: dict[int, bytes] = {}
        while engine.has_work:
            found |= {sequence.choice: data for sequence, data in engine.step().vectors}
        return np.stack([np.frombuffer(found[index], "<f4") for index in range(num)])

    return embed


def sentence_transformers_of(folder: Path) -> Embed:
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: np.asarray(model.encode(list(texts)))


class Infinity:
    """infinity-emb in a process of its own; its time is taken there."""

    def __init__(self, python: str, folder: Path, num_threads: int) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - the operator names the interpreter
            [python, "-c", _INFINITY, str(folder), str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def embed(self, texts: Seq[str]) -> tuple[float, Vectors]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(list(texts)), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("@"):
                took_s, vectors = json.loads(line[1:])
                return took_s, np.asarray(vectors, dtype=np.float32)
        raise RuntimeError("infinity-emb has ended; see above")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def timed(embed: Embed) -> Callable[[Seq[str]], tuple[float, Vectors]]:
    def run(texts: Seq[str]) -> tuple[float, Vectors]:
        start_s = time.perf_counter()
        vectors = embed(texts)
        return time.perf_counter() - start_s, vectors

    return run


def measure(
    contestants: Mapping[str, Callable[[Seq[str]], tuple[float, Vectors]]],
    num_texts: int,
    num_runs: int,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the seconds of each run by name, in turn with the same texts; and the least cosine to
    the first contestant's vectors. A first round is not counted."""
    took: dict[str, list[float]] = {name: [] for name in contestants}
    least = dict.fromkeys(contestants, 1.0)
    for number in range(num_runs + 1):
        texts = make_texts(num_texts, seed=number)
        expected = None
        for name, run in contestants.items():
            took_s, vectors = run(texts)
            expected = vectors if expected is None else expected
            norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
            least[name] = min(least[name], float(((vectors * expected).sum(1) / norms).min()))
            if number:
                took[name].append(took_s)
    return took, least


def main(argv: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.pooling", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--step-tokens", type=int, help="token budget of a step")
    parser.add_argument("--infinity", metavar="PYTHON", help="an interpreter with infinity-emb")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows = [("model", "with", "texts/s", "least", "most", "ratio", "least cosine")]
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            rows += _rows(size, save_model(size, Path(name)), arguments)
    print(f"{arguments.texts} texts, {arguments.threads} threads, {arguments.runs} runs in turn")
    print(table(rows))
    return 0


def _rows(
    size: str, folder: Path, arguments: argparse.Namespace
) -> list[tuple[str, str, str, str, str, str, str]]:
    contestants = {
        "sentence-transformers": timed(sentence_transformers_of(folder)),
        "batchway": timed(engine_of(folder, arguments.step_tokens)),
    }
    other = None
    if arguments.infinity:
        other = Infinity(arguments.infinity, folder, arguments.threads)
        contestants["infinity-emb"] = other.embed
    took, least = measure(contestants, arguments.texts, arguments.runs)
    if other is not None:
        other.close()
    rates = {n: sorted(arguments.texts / took_s for took_s in some) for n, some in took.items()}
    base = statistics.median(rates["sentence-transformers"])
    return [
        (
            size,
            name,
            f"{statistics.median(some):.1f}",
            f"{some[0]:.1f}",
            f"{some[-1]:.1f}",
            f"{statistics.median(some) / base:.2f}",
            f"{least[name]:.6f}",
        )
        for name, some in rates.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
