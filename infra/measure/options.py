"""Options of `batchway bench`, `batchway compare` and `batchway cascade fit`.

Imports no command: some load torch, others need an extra.
"""

import argparse
import importlib
from pathlib import Path

from infra.option_values import http_url, integer, number
from infra.options import (
    COUNT,
    FILE,
    JSON,
    MODEL,
    NAME,
    SECONDS,
    SHARE,
    Option,
    Value,
    add_length_options,
    add_options,
)
from infra.preconditions import check_extra

_OUT = Value(Path, "OUT")
_MILLISECONDS = Value(number(may_be_zero=False), "MS")
_SEED = Value(int, "N")
_BASE_URL = Option(
    "base URL of the API, with its version", Value(http_url, "URL"), "http://127.0.0.1:8000/v1"
)
_ENGINE = {
    "max_running": Option("the most sequences that run at once", COUNT, 32),
    "max_batched_tokens": Option("token budget of a step", COUNT, shown="chosen for the device"),
    "strategy": Option(
        "how sequences are batched", ("continuous", "static", "dynamic"), "continuous"
    ),
    "threads": Option("threads", COUNT, shown="torch's"),
    "torch_only": Option(
        "no merged modules and no kernels of batchway's own",
        None,
        shown="both, where they prove equal",
    ),
}
_SERVER = {
    "base_url": _BASE_URL,
    "model": Option("the model to call", NAME, shown="the first that the server lists"),
    "plain": Option(
        "send only OpenAI's own fields; answers may then end early",
        None,
        shown="ignore_eos and return_token_ids",
    ),
    "timeout_s": Option("a call fails after this time without a byte", SECONDS, 120.0),
}
_REQUESTS = {
    "workload": Option("a workload file of `batchway bench engine`", FILE, shown="random requests"),
    "requests": Option("random requests", COUNT, 100),
    "prompt": Option(
        "ids: token ids to /completions; text: words to /completions; chat: words to "
        "/chat/completions",
        ("ids", "text", "chat"),
        "ids",
    ),
    "vocab_size": Option("random token ids are 4 to N - 1", Value(integer(5), "N"), 256),
    "cancel_share": Option(
        "share of callers that disconnect during their answer, 0 to 1",
        Value(number(may_be_zero=True, most=1), "SHARE"),
        0.0,
    ),
    "seed": Option("seed of all random choices", _SEED, 0),
}
_ARRIVALS = {
    "arrivals": Option(
        "distribution of the gaps between requests", ("poisson", "gamma", "constant"), "poisson"
    ),
    "burstiness": Option(
        "shape of --arrivals gamma: 1 is Poisson, less is burstier, more is smoother",
        Value(number(may_be_zero=False), "SHAPE"),
        0.5,
    ),
    "trace": Option(
        "arrivals and lengths from a CSV file with the columns arrival_s, prompt_tokens and "
        "max_tokens; with --rate only its lengths are used",
        FILE,
    ),
    "max_concurrency": Option(
        "calls at a time; in an open loop further requests are sent late",
        COUNT,
        shown="16 callers in a closed loop, no limit in an open one",
    ),
    "warm_up": Option("uncounted requests that are sent first", Value(integer(0), "N"), 4),
}
_RESULTS = {
    "slo_ttft_ms": Option(
        "goodput counts only answers whose first token came within this time",
        _MILLISECONDS,
        shown="any",
    ),
    "slo_itl_ms": Option(
        "and whose mean time per later token is within this time", _MILLISECONDS, shown="any"
    ),
    "csv": Option("write one line for each request", _OUT),
    "png": Option("plot rates, distributions and timelines", _OUT),
}
_COMPARED = {
    "model": MODEL["model"],
    "config": Option(
        "compare this batching.yaml too; may be repeated", FILE, [], "the three strategies"
    ),
    "flat": Option(
        "compute static and dynamic batches without padding, as this engine serves",
        None,
        shown="padded to rectangles",
    ),
    "max_running": Option(
        "the most sequences that run at once, and the size of a full batch; overrides files",
        COUNT,
        16,
    ),
    "threads": Option("CPU threads", COUNT, shown="torch's own"),
    "workload": Option(
        "a workload file of `batchway bench engine`, without its arrival times",
        FILE,
        shown="random requests",
    ),
    "requests": Option("random requests in each run", COUNT, 96),
    "rounds": Option("rounds, each with all strategies in turn; reports medians", COUNT, 3),
    "png": Option("plot results; needs the extra bench", _OUT),
}
_FIT = {
    "target_quality": Option("of the last member's quality", SHARE, 0.98),
    "models": Option(
        "the models.yaml with the cascade; its threshold is not used",
        FILE,
        shown="none, for data that --save wrote",
    ),
    "flow": Option("the cascade's name", NAME, shown="the file's only cascade"),
    "base_url": _BASE_URL,
    "max_concurrency": Option("concurrent calls", COUNT, 4),
    "save": Option(
        "write confidence, quality and cost of each answer as JSON lines, without any text, for "
        "--data",
        _OUT,
    ),
    "seed": Option("seed of the resampling", _SEED, 0),
    "png": Option("plot cost and quality", _OUT),
}


def run_bench(options: argparse.Namespace) -> int:
    check_extra("bench" if options.bench == "serve" else "worker")
    return _run(options.bench, options)


def run_compare(options: argparse.Namespace) -> int:
    check_extra("worker")
    if options.png is not None:
        check_extra("bench")
    from workers.model.folder_check import check_folder
    from workers.model.gguf_cache import made_folder

    options.model = made_folder(options.model, options.dtype)
    check_folder(options.model)
    return _run("compare", options)


def run_cascade(options: argparse.Namespace) -> int:
    check_extra("gateway")  # it reads models.yaml
    check_extra("bench")
    return _run("cascade", options)


def _run(name: str, options: argparse.Namespace) -> int:
    command = importlib.import_module(f"infra.measure.{name}")
    status: int = command.run(options)
    return status


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    engine = benches.add_parser(
        "engine",
        help="run a workload file through the engine alone: no Redis, no HTTP",
        description="Runs a workload through the engine in this process and prints output tokens "
        "per second, and latencies in milliseconds. Greedy; end tokens are ignored.",
    )
    engine.add_argument("--model", required=True, metavar="DIR", help="folder or Hub name")
    engine.add_argument(
        "--workload",
        required=True,
        type=Path,
        metavar="FILE",
        help='JSON: {"requests": [{"prompt_token_ids": [...], "max_tokens": N, '
        '"arrival_s"?: S}, ...]}',
    )
    add_options(engine, MODEL, "dtype", "quantization")
    add_options(engine, _ENGINE)
    add_options(engine, JSON)
    add_serve_options(
        benches.add_parser(
            "serve",
            help="put load on this server, or any with OpenAI's completions API, over HTTP",
            description="Sends requests at arrival times (--rate, --trace or a workload's: an open "
            "loop), or from a fixed number of callers (a closed loop), and reports throughput and "
            "latencies. The API key is the variable BATCHWAY_API_KEY, else OPENAI_API_KEY. "
            "Exit status 1 if no request succeeded.",
        )
    )


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("the server"), _SERVER)
    requests = parser.add_argument_group("the requests")
    add_options(requests, _REQUESTS, "workload", "requests")
    add_length_options(requests, "16:512", "8:256")
    add_options(requests, _REQUESTS, "prompt", "vocab_size", "cancel_share", "seed")
    times = parser.add_argument_group("arrival times")
    times.add_argument(
        "--rate",
        type=number(may_be_zero=False),
        nargs="+",
        metavar="PER_S",
        help="requests per second of an open loop; several rates run one after another "
        "(default: a closed loop)",
    )
    add_options(times, _ARRIVALS)
    add_options(parser.add_argument_group("the results"), _RESULTS)
    add_options(parser, JSON)


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model and the strategies")
    add_options(group, _COMPARED, "model", "config", "flat", "max_running")
    add_options(group, MODEL, "dtype")
    add_options(group, _COMPARED, "threads")
    add_options(group, MODEL, "kv_cache_gib")
    group = parser.add_argument_group("the workload")
    add_options(group, _COMPARED, "workload", "requests")
    add_length_options(group, "16:128", "4:128")
    group.add_argument(
        "--load",
        type=number(may_be_zero=False),
        nargs="*",
        default=[0.5, 0.8],
        metavar="SHARE",
        help="rates of Poisson arrivals, as shares of the best strategy's requests per second with "
        "all requests at once (default: 0.5 0.8)",
    )
    add_options(group, _COMPARED, "rounds")
    add_options(group, _REQUESTS, "seed")
    add_options(parser, _COMPARED, "png")
    add_options(parser, JSON)


def add_cascade_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    fit = actions.add_parser(
        "fit",
        help="choose the threshold of a cascade of two models on questions with known answers",
        description="Asks both members of a cascade each question of --data, or reads what was "
        "measured before, and finds the cheapest threshold that keeps the target quality. The API "
        "key is the variable BATCHWAY_API_KEY, else OPENAI_API_KEY. Exit status 1 if no threshold "
        "keeps the target.",
    )
    fit.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines: a body with `prompt` or `messages`, and `answer`, the right text, or an "
        "object whose fields the answer must have; or lines that --save wrote (default: none, "
        "required)",
    )
    add_options(fit, _FIT, "target_quality")
    asking = fit.add_argument_group("asking the members")
    add_options(asking, _FIT, "models", "flow", "base_url")
    asking.add_argument(
        "--token-costs",
        type=number(may_be_zero=True),
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="cost of a token, read or written, of each member, in any unit (default: a call costs "
        "its seconds)",
    )
    add_options(asking, _FIT, "max_concurrency", "save")
    add_options(fit, _FIT, "seed", "png")
    add_options(fit, JSON)
