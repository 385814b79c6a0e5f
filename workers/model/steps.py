"""Chooses how steps follow each other: as the operator asked, or what passes the self-test."""

import logging
from collections.abc import Callable

from workers.model.ahead.runner import AheadRunner
from workers.model.ahead.self_test import SelfTestFailed, check_graphs, check_rows
from workers.model.backend import Backend
from workers.model.gpu.graphs import Record, recorder
from workers.model.loaded import Loaded
from workers.model.runner import ModelRunner

log = logging.getLogger("batchway.engine")


def choose_steps(
    paged: ModelRunner, backend: Backend, loaded: Loaded, progress: Callable[[str], None]
) -> ModelRunner | AheadRunner:
    """Returns a runner that passed its self-test. `auto` leaves out what fails, with a line in the
    log. Raises SelfTestFailed for a way that was asked for."""
    steps = loaded.options.steps
    is_auto = steps == "auto"
    if is_auto:
        steps = "graphs" if backend.for_gpu else "direct"
    if steps == "direct":
        return paged

    def ahead(record: Record | None = None) -> AheadRunner:
        max_num_seqs = loaded.options.max_num_seqs
        return AheadRunner(paged, backend.prepare_rows, max_num_seqs, loaded.device, record)

    try:
        check_rows(ahead(), paged, loaded.config)
    except SelfTestFailed as exc:
        if not is_auto:
            raise
        log.warning("steps are direct: %s", exc)
        return paged
    if steps == "ahead":
        return ahead()
    model = ahead(recorder(steps))
    try:
        progress(f"{check_graphs(model, paged, loaded.config)} CUDA graphs are recorded")
    except SelfTestFailed as exc:
        if not is_auto:
            raise
        log.warning("steps are ahead without graphs: %s", exc)
        return ahead()
    return model
