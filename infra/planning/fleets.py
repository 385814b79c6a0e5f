"""The fleet that a command line describes, by a file of costs or by a device's data sheet."""

import argparse
from dataclasses import replace

import msgspec

from infra.measure.workloads import BadWorkload
from infra.planning.calibration import fleet_with
from infra.planning.costs import Fitted, read_costs
from infra.planning.engine import Server
from infra.planning.plan import server_of
from infra.planning.shapes import read_shape
from infra.planning.worker import Fleet
from infra.pool import PoolPolicy
from workers import configuration
from workers.configuration import ConfigurationError
from workers.ipc.messages import EngineOptions

_WAIT_TARGETS_S = {"interactive": 5.0, "standard": 60.0, "batch": 900.0}
_BLOCK_SIZE = 16


def fleet_of(options: argparse.Namespace) -> Fleet:
    """Raises BadWorkload, ModelRefused."""
    engine = EngineOptions(model_path="", max_num_seqs=options.max_num_seqs)
    if options.batching is not None:
        try:
            engine = configuration.load(options.batching).apply(engine)
        except ConfigurationError as exc:
            raise BadWorkload(str(exc)) from exc
    if options.costs is not None:
        costs = read_costs(options.costs)
        if engine.max_num_seqs is None:  # neither the option nor the file says another
            engine = msgspec.structs.replace(engine, max_num_seqs=costs.max_num_seqs)
        fleet = fleet_with(costs, engine, options.workers)
    elif options.model is None:
        raise BadWorkload("give --costs, or --model and --device")
    else:
        shape = read_shape(options.model)
        precision = options.precision or shape.precision
        server = server_of(shape, options.device, options.engine, precision, options.memory_share)
        fleet = fleet_of_server(server, engine)
    policy = None
    if options.max_workers is not None:
        policy = PoolPolicy(
            wait_targets_s=_WAIT_TARGETS_S,
            max_workers=max(options.max_workers, options.workers),
            cold_start_s=options.load_s,
        )
    return replace(fleet, num_workers=options.workers, load_s=options.load_s, policy=policy)


def fleet_of_server(server: Server, options: EngineOptions) -> Fleet:
    """One worker with this server. Its KV is in whole blocks."""
    kv_bytes = server.sizes.kv_bytes(_BLOCK_SIZE)
    return Fleet(
        costs=server,
        num_blocks=int(server.free_bytes // kv_bytes),
        block_size=_BLOCK_SIZE,
        step_tokens=server.engine.step_tokens,
        max_model_len=server.sizes.shape.max_model_len,
        options=options,
    )


def errors_of(fleet: Fleet) -> dict[str, float]:
    """By figure, how far simulations with these step times were off; empty where unknown."""
    if isinstance(fleet.costs, Fitted):
        return fleet.costs.errors
    assert isinstance(fleet.costs, Server)
    return {"between tokens, on average": fleet.costs.engine.error}
