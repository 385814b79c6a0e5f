"""`batchway ab report`, and the options that put a candidate beside the batching.yaml in use."""

import argparse
import asyncio

from contract.ab import ARMS, AbJob, AbRecord, merged, read_ab
from contract.catalogue import Catalogue
from contract.connection import now_ms
from contract.shards import OpenShards
from infra import options as opts
from infra.ab_report import TOO_FEW, WORSE, Terms, compare_arms, report_text
from infra.option_values import model_name, number
from infra.options import Option, Value
from infra.preconditions import UsageError
from infra.tables import write

EXIT_WORSE = 1
EXIT_NO_VERDICT = 2
WORKER_CANDIDATE_SHARE = 0.5


# --- options of `up` and `worker` -------------------------------------------------------------


def add_candidate_options(parser: argparse.ArgumentParser, *, share_default: str) -> None:
    group = parser.add_argument_group("two batching configurations on the same jobs")
    table = {
        "candidate": Option(
            "a second batching.yaml to compare with the first: see `batchway ab report`", opts.FILE
        ),
        "candidate_share": Option(
            "share of the jobs for the candidate",
            Value(number(may_be_zero=False, most=0.99), "SHARE"),
            shown=share_default,
        ),
    }
    opts.add_options(group, table)


def check_candidate(options: argparse.Namespace) -> int:
    """Returns how many workers of `up` run the candidate. Raises UsageError."""
    if options.candidate is None:
        candidate_share(options)
        return 0
    _check_configured(options)
    if options.workers < 2:
        raise UsageError("--candidate needs --workers 2 or more: some for each configuration")
    share, num_workers = options.candidate_share, int(options.workers)
    num = num_workers // 2 if share is None else round(share * num_workers)
    if share is not None and abs(num - share * num_workers) > 1e-6:
        raise UsageError(
            f"--candidate-share {share:g} of --workers {options.workers} is no whole number of "
            "workers, so a worker of one configuration would get more jobs than one of the other"
        )
    return num


def entry_candidate(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns additional arguments for the workers of an entry of a fleet. Raises UsageError."""
    share = candidate_share(options)
    if options.candidate is None:
        return ()
    _check_configured(options)
    return (f"--candidate={options.candidate}", f"--candidate-share={share:g}")


def _check_configured(options: argparse.Namespace) -> None:
    from workers.configuration import ConfigurationError, configured  # needs PyYAML

    try:
        configured(opts.engine_options(options), options.batching, options.candidate)
    except ConfigurationError as exc:
        raise UsageError(str(exc)) from exc


def candidate_share(options: argparse.Namespace) -> float:
    """The candidate's share of a worker. Raises UsageError."""
    if options.candidate is None and options.candidate_share is not None:
        raise UsageError("--candidate-share needs --candidate")
    return float(options.candidate_share or WORKER_CANDIDATE_SHARE)


def candidate_arguments(options: argparse.Namespace, num_candidates: int) -> tuple[str, ...]:
    """Returns additional arguments for the candidate's workers of `up`."""
    if not num_candidates:
        return ()
    share = num_candidates / options.workers
    return (f"--candidate={options.candidate}", f"--candidate-share={share:g}")


# --- the command ------------------------------------------------------------------------------


def add_ab_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    report = opts.add_action(
        actions,
        "report",
        "compare throughput, goodput and latencies; exit status 1: worse, 2: no verdict",
    )
    bound = Value(number(may_be_zero=False), "MS")
    table = {
        "served_model_name": Option(
            "the model", Value(model_name, "NAME"), shown="the only one with a candidate"
        ),
        "lane": Option("only jobs of this lane", Value(str, "LANE"), shown="any"),
        "last_s": Option(
            "only jobs that were submitted in this time", opts.SECONDS, shown="the last 20,000 jobs"
        ),
        "margin": Option(
            "relative change for the worse that is tolerated",
            Value(number(may_be_zero=True, most=1.0), "SHARE"),
            Terms.margin,
        ),
        "min_jobs": Option(
            "ended jobs that each version needs for a verdict", opts.COUNT, Terms.min_jobs
        ),
        "slo_ttft_ms": Option(
            "goodput counts jobs whose time to first token is within this", bound, shown="no bound"
        ),
        "slo_itl_ms": Option(
            "goodput counts jobs whose mean time between tokens is within this",
            bound,
            shown="no bound",
        ),
        "seed": Option("seed of the bootstrap", Value(int, "N"), Terms.seed),
    }
    opts.add_options(report, table)


def run_ab(options: argparse.Namespace, redis_url: str) -> int:
    """Returns the exit status. Raises UsageError, BrokerUnavailable, WireError."""
    model, record, jobs = asyncio.run(_read(options, redis_url))
    ttft_ms, itl_ms = options.slo_ttft_ms, options.slo_itl_ms
    terms = Terms(
        margin=options.margin,
        min_jobs=options.min_jobs,
        ttft_s=ttft_ms and ttft_ms / 1000,
        itl_s=itl_ms and itl_ms / 1000,
        seed=options.seed,
    )
    found = {"model": model, **compare_arms(record, jobs, terms)}
    write(found, f"{model}\n{report_text(found)}", options.json)
    return {WORSE: EXIT_WORSE, TOO_FEW: EXIT_NO_VERDICT}.get(found["verdict"], 0)


async def _read(options: argparse.Namespace, redis_url: str) -> tuple[str, AbRecord, list[AbJob]]:
    """The model, its A/B, and the wanted jobs of both present versions. Raises UsageError."""
    name = options.served_model_name
    async with OpenShards(redis_url, options.namespace) as shards:
        client, keys = shards.first.client, shards.first.keys
        cards = await Catalogue(client, keys).models()
        names = [card.name for card in cards] if name is None else [name]
        records = dict[str, AbRecord]()
        for each in names:
            parts = [await read_ab(s.client, s.keys, each) for s in await shards.all()]
            if known := [part for part in parts if part is not None]:
                records[each] = merged(known)
        since_ms = await now_ms(client) - 1000 * options.last_s if options.last_s else 0
    if not records:
        raise UsageError("no worker has run a candidate: start some with --candidate")
    if len(records) > 1:
        raise UsageError(
            f"several models have one: give --served-model-name of {', '.join(records)}"
        )
    [(model, record)] = records.items()
    if len(set(record.versions.values())) < len(ARMS):
        raise UsageError("both versions are the same configuration")
    jobs = [
        job
        for job in record.jobs
        if record.versions.get(job.arm) == job.version
        and job.created_ms >= since_ms
        and options.lane in (None, job.lane)
    ]
    return model, record, jobs
