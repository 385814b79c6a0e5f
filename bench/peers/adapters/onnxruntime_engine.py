"""onnxruntime-genai's engine. The model is converted once, beside its checkpoint.

On a CPU it batches statically, four requests at a time (`static_batch_size` in its scheduler). Its
continuous batching needs paged attention, which its builder supports only on GPUs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime_genai as og

from bench.peers.adapters.record import Record, Request, arguments, read_requests

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
_NUM_EVENTS = 256  # per call


def converted(model: str, dtype: str) -> str:
    """The converted model's folder. Raises CalledProcessError for an unsupported type."""
    folder = Path(model).resolve()
    precision = _PRECISIONS[dtype]
    target = folder.with_name(f"{folder.name}-onnx-{precision}")
    if not (target / "genai_config.json").exists():
        program = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        with tempfile.TemporaryDirectory() as cache:
            options = ["-m", folder, "-i", folder, "-o", target, "-p", precision, "-c", cache]
            command = [*program, *map(str, options), "-e", "cpu"]
            subprocess.run(command, check=True, stdout=sys.stderr)  # noqa: S603
    return str(target)


def main() -> None:
    options = arguments()
    requests = read_requests(options.workload)
    config = og.Config(converted(options.model, options.dtype))
    batching = {"static_batching": {"max_batch_size": options.max_running}}
    config.overlay(json.dumps({"engine": batching}))
    engine = og.Engine(og.Model(config))
    run(engine, [request | {"max_tokens": 4} for request in requests[:4]])
    run(engine, requests).write(options.json)


def run(engine: og.Engine, requests: list[Request]) -> Record:
    record = Record(len(requests))
    open_requests = []
    for request in requests:
        session = og.RequestOptions()
        session.set_max_session_tokens(len(request["prompt_token_ids"]) + request["max_tokens"])
        opened = engine.create_request(options=session)
        turn = og.TurnOptions(opened)
        turn.set_do_sample(False)
        turn.set_max_generated_tokens(request["max_tokens"])
        turn.set_min_generated_tokens(request["max_tokens"])
        opened.begin_turn(np.array(request["prompt_token_ids"], dtype=np.int32), turn)
        open_requests.append(opened)
    numbers = {id(opened): number for number, opened in enumerate(open_requests)}
    events = engine.create_event_buffer(_NUM_EVENTS)
    while engine.has_pending_requests():
        for event in engine.run(events):
            flags = event.flags.value
            assert not flags & og.EngineEventFlags.FAILED.value, event.error_code
            if flags & og.EngineEventFlags.TOKEN.value:
                record.add(numbers[id(event.request)], [int(event.token)])
    for opened in open_requests:
        opened.close()
    return record


if __name__ == "__main__":
    main()
