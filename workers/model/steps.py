"""Chooses how steps follow each other: by what passes the self-test."""

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
    """Returns a runner that passed its self-test. What fails is left out, with a line in the log.
    Raises SelfTestFailed if steps ahead were asked for and fail."""
    asked = loaded.options.ahead
    if not (backend.for_gpu if asked is None else asked):
        return paged

    def ahead(record: Record | None = None) -> AheadRunner:
        max_num_seqs = loaded.options.max_num_seqs
        return AheadRunner(paged, backend.prepare_rows, max_num_seqs, loaded.device, record)

    try:
        check_rows(ahead(), paged, loaded.config)
    except SelfTestFailed as exc:
        if asked:
            raise
        log.warning("no step runs ahead: %s", exc)
        return paged
    record = recorder(loaded.device)
    if record is None:
        return ahead()
    model = ahead(record)
    try:
        progress(f"{check_graphs(model, paged, loaded.config)} CUDA graphs are recorded")
    except SelfTestFailed as exc:
        log.warning("steps are ahead without graphs: %s", exc)
        return ahead()
    return model
