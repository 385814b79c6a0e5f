"""`batchway jobs calibration`: compares predicted waits with actual ones."""

import argparse
import asyncio
import contextlib
from dataclasses import asdict

from contract.calibration import Calibration, calibrations
from contract.catalogue import Catalogue
from contract.connection import connect
from contract.keys import Keys
from infra import option_values
from infra.tables import table, write

_HEADING = ("lane", "jobs", "half within", "nine in ten within")


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=option_values.model_name,
        metavar="NAME",
        help="of this model alone (default: of every model)",
    )


def run_calibration(options: argparse.Namespace, redis_url: str) -> None:
    """Raises BrokerUnavailable, WireError."""
    found = asyncio.run(_read(options, redis_url))
    result = {model: [asdict(lane) for lane in lanes] for model, lanes in found.items()}
    parts = [
        f"{model}\n{table([_HEADING, *(_row(lane) for lane in lanes)])}"
        for model, lanes in found.items()
    ]
    write({"models": result}, "\n\n".join(parts) or "no model is known", options.json)


async def _read(options: argparse.Namespace, redis_url: str) -> dict[str, list[Calibration]]:
    keys = Keys(options.namespace)
    async with contextlib.aclosing(connect(redis_url)) as client:
        return {
            card.name: await calibrations(client, keys, card.name, card.lanes)
            for card in await Catalogue(client, keys).models()
            if options.model in (None, card.name)
        }


def _row(lane: Calibration) -> tuple[str, ...]:
    return lane.lane, str(lane.num_jobs), _percent(lane.p50), _percent(lane.p90)


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.0f} %"
