"""The command `batchway`: parses options and runs the command. Commands import what they need."""

import argparse
import asyncio
import errno
import io
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from contract.errors import BrokerUnavailable, CommandDenied, JobRefused, WireError
from infra import options as opts
from infra.ab_command import candidate_arguments, candidate_share, check_candidate
from infra.callbacks_command import ALLOW_VARIABLE
from infra.commands import COMMANDS
from infra.engine_choice import choose_engine, engine_python
from infra.fleet import fleet_of, share_memory, share_threads, worker_arguments, worker_names
from infra.keys_command import keys_exist
from infra.log_repeats import Repeats
from infra.parser import build_parser
from infra.preconditions import (
    Failed,
    UsageError,
    check_directory,
    check_extra,
    check_flows_file,
    check_partitions,
    check_redis,
    check_store,
    known_redis,
    make_folder,
    operators_redis,
)
from workers.engine.interface import ModelRefused

if TYPE_CHECKING:
    from gateway.settings import GatewaySettings
    from infra.gateways import Gateways

log = logging.getLogger("batchway")

EXIT_FAILED, EXIT_USAGE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    _open_standard_files()
    _leave_proxies_out()
    options = build_parser().parse_args(arguments)
    handler = logging.StreamHandler()
    handler.addFilter(Repeats())
    logging.basicConfig(
        level=getattr(options, "log_level", "info").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        datefmt="%H:%M:%S",
        handlers=[handler],
    )
    logging.getLogger("uvicorn").setLevel("WARNING")  # its startup messages repeat ours
    serving = {"up": _up, "gateway": _gateway, "worker": _worker, "callbacks": _callbacks}
    try:
        return serving.get(options.command, _run)(options)
    except (UsageError, CommandDenied, WireError, argparse.ArgumentTypeError) as exc:
        print(f"batchway {options.command}: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except (Failed, JobRefused, ModelRefused) as exc:
        print(f"batchway {options.command}: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except (OSError, UnicodeEncodeError) as exc:  # the place: its files, limits or locale
        print(f"batchway {options.command}: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _open_standard_files() -> None:
    """Opens those that are closed: children would take the next socket or file for one of them.
    What the locale cannot express is shown by number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _leave_proxies_out() -> None:
    """No call of this machine to itself, here or in a child, goes through a proxy that a variable
    names."""
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, [others, "localhost,127.0.0.1,::1"]))


def _run(options: argparse.Namespace) -> int:
    command = COMMANDS[options.command]
    if not command.needs_redis:
        return command.run(options)
    try:
        return command.run(options, operators_redis(options))
    except (BrokerUnavailable, ValueError) as exc:
        raise UsageError(str(exc)) from exc


# --- commands ---------------------------------------------------------------------------------


def _up(options: argparse.Namespace) -> int:
    check_extra("serve")
    check_directory(options.object_store)
    entries = fleet_of(options)
    num_candidates = check_candidate(options)
    if options.models:
        own = {entry.served_model_name for entry in entries} if options.redis_url is None else ()
        check_flows_file(options.models, served=sorted(own))
    os.environ[ALLOW_VARIABLE] = options.callback_allow  # read by gateway and callbacks
    if options.redis_url is not None and options.data_dir is not None:
        raise UsageError(
            "--data-dir keeps the data of a Redis that batchway starts; here REDIS_URL or "
            "--redis-url names another"
        )
    if options.durability == "durable" and options.data_dir is None:
        raise UsageError(
            "--durability durable needs --data-dir DIR: without it a Redis of our own keeps "
            "nothing; one that REDIS_URL names has appendfsync set by whoever runs it"
        )
    shared = (f"--namespace={options.namespace}", f"--log-level={options.log_level}")
    drain = f"--drain-s={options.drain_s}"

    from infra.child import PartEnded
    from infra.local_stack import StackOptions, WorkerPlan, placed, run_up

    share_memory(entries)
    share_threads(entries)

    named = list(worker_names(entries))
    candidate = candidate_arguments(options, num_candidates)
    are_candidates = [len(named) - number <= num_candidates for number in range(len(named))]

    settings = _gateway_settings(options, options.redis_url or "")
    workers = tuple(
        WorkerPlan(
            name,
            entry.served_model_name,
            (*worker_arguments(entry), *(candidate if is_candidate else ()), drain, *shared),
        )
        for is_candidate, (name, entry) in zip(are_candidates, named, strict=True)
    )
    try:
        placed(workers, settings.partitions or 1)
    except PartEnded as exc:
        raise UsageError(str(exc)) from exc
    stack = StackOptions(
        redis_url=options.redis_url,
        namespace=options.namespace,
        num_partitions=settings.partitions,
        data_dir=options.data_dir,
        object_store=options.object_store,
        fsync="always" if options.durability == "durable" else "everysec",
        redis_memory_bytes=options.redis_memory_gib and int(options.redis_memory_gib * opts.GIB),
        gateways=_gateways(settings, options),
        allowed_hosts=settings.allowed_hosts,
        workers=workers,
        drain_s=options.drain_s,
        callbacks_arguments=(drain, *shared),
    )
    return asyncio.run(run_up(stack))


def _gateway(options: argparse.Namespace) -> int:
    check_extra("gateway")
    check_flows_file(options.models)
    settings = _gateway_settings(options, known_redis(options))
    check_redis(settings.redis_url, settings.namespace)
    check_partitions(settings.redis_url, settings.namespace, settings.partitions)
    check_store(settings.redis_url, settings.namespace, settings.object_store)
    listeners = [socket.socket(fileno=fd) for fd in options.listen_fd]
    if not listeners:
        gateways = _gateways(settings, options)
        if options.gateways > 1:
            from infra.local_stack import run_gateways

            os.environ[opts.OBJECT_STORE_VARIABLE] = options.object_store
            return asyncio.run(run_gateways(gateways, settings.redis_url))
        listeners = [*gateways.listeners]

    from gateway.http.listener import bind
    from gateway.server import serve
    from infra.child import end_with_parent

    if len(listeners) > 1:  # the first keeps the port that all share, and does not listen
        host, port = listeners[0].getsockname()[:2]
        listeners[0] = bind(settings, host, port, has_keys=True, is_shared=True)
    end_with_parent(options.drain_s + opts.LIFELINE_GRACE_S)
    # uvicorn raises the signal it handled again when it has ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    serve(settings, listeners=listeners, on_bound=_say_where)
    return 0


def _gateway_settings(options: argparse.Namespace, url: str) -> "GatewaySettings":
    """The gateway's settings: from the environment, where no option says otherwise."""
    from gateway.settings import GatewaySettings  # needs pydantic, which a worker does not have

    try:
        return GatewaySettings.from_env(
            redis_url=url,
            namespace=options.namespace,
            drain_s=options.drain_s,
            object_store=options.object_store,
            models=options.models,
            allowed_origins=options.allowed_origins,
            partitions=options.partitions,
        )
    except ValueError as exc:
        raise UsageError(str(exc)) from exc


def _gateways(settings: "GatewaySettings", options: argparse.Namespace) -> "Gateways":
    """Binds their sockets, before anything else is started: of several, each one's own has one of
    the ports that follow, or a free one."""
    from infra.gateways import Gateways

    ports = range(options.port, options.port + 1 + options.gateways * (options.gateways > 1))
    listeners = [_bind(settings, options.host, ports[0], is_shared=len(ports) > 1)]
    listeners += [_bind(settings, options.host, options.port and port) for port in ports[1:]]
    names = ("drain_s", "models", "allowed_origins", "namespace", "log_level")
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    return Gateways(listeners, words, options.drain_s + opts.LIFELINE_GRACE_S)


def _bind(
    settings: "GatewaySettings", host: str, port: int, is_shared: bool = False
) -> socket.socket:
    from gateway.http.listener import UnsafeBinding, bind, is_loopback

    try:
        has_keys = not is_loopback(host) and _has_keys(settings)
        return bind(settings, host, port, has_keys=has_keys, is_shared=is_shared)
    except UnsafeBinding as exc:
        raise UsageError(str(exc)) from exc
    except (OSError, OverflowError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        is_taken = getattr(exc, "errno", None) == errno.EADDRINUSE
        hint = "; choose another with --port" if is_taken else ""
        raise UsageError(f"cannot listen on {host} port {port}: {reason}{hint}") from exc


def _has_keys(settings: "GatewaySettings") -> bool:
    """Whether Redis has an API key. `up`'s own has none that anybody could know."""
    if settings.api_key is not None or not settings.redis_url:
        return False
    try:
        return asyncio.run(keys_exist(settings.redis_url, settings.namespace))
    except BrokerUnavailable as exc:
        raise UsageError(
            f"{exc}, so it is unknown whether an API key exists: set BATCHWAY_API_KEY, or "
            "bind to 127.0.0.1"
        ) from exc


def _say_where(host: str, port: int, *own: int) -> None:
    alone = "".join(f", alone on port {each}" for each in own)
    logging.getLogger("batchway.gateway").info("listening on %s port %d%s", host, port, alone)


def _worker(options: argparse.Namespace) -> int:
    check_extra("worker")
    opts.choose_gpu(options)
    if options.engine_module is None:
        make_folder(options)
    choose_engine(options)
    log.info("starting a worker of %s", options.model)
    takes_jobs = options.node_rank == 0
    url = known_redis(options) if takes_jobs else ""
    if takes_jobs:
        check_redis(url, options.namespace)
        check_store(url, options.namespace, options.object_store)

    from dataclasses import replace

    from infra.child import end_with_parent
    from workers.settings import VLLM_ENGINE, WorkerSettings
    from workers.supervisor.node import run_node
    from workers.supervisor.supervisor import run_worker

    settings = WorkerSettings(
        redis_url=url,
        served_model_name=opts.served_name(options),
        engine=opts.engine_options(options),
        namespace=options.namespace,
        partition=options.partition,
        lanes=options.lanes,
        lease_s=options.lease_s,
        step_timeout_s=options.step_timeout_s,
        drain_s=options.drain_s,
        drain_release_s=options.drain_release_s,
        spot_notice=options.spot_notice,
        object_store=options.object_store,
        batching_path=options.batching,
        candidate_path=options.candidate,
        candidate_share=candidate_share(options),
        metrics_port=options.metrics_port,
        auto_truncate=options.auto_truncate,
        notice=options.notice or "",
    )
    if options.engine == "vllm":
        settings = replace(
            settings, engine_module=VLLM_ENGINE, engine_python=engine_python(options) or ""
        )
    elif options.engine_module is not None:
        settings = replace(settings, engine_module=options.engine_module)
    end_with_parent(options.drain_s + opts.LIFELINE_GRACE_S)
    return asyncio.run(run_worker(settings) if takes_jobs else run_node(settings))


def _callbacks(options: argparse.Namespace) -> int:
    if options.callbacks is None:
        check_extra("callbacks")
        check_store(known_redis(options), options.namespace, options.object_store)
    return _run(options)
