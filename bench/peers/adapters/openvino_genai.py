"""OpenVINO GenAI's continuous batching. The model is converted once, beside its checkpoint."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from bench.peers.adapters.record import Record, Request, arguments, read_requests

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}
# The fastest of 256, 512 and 2,048 on our workloads.
_MAX_BATCHED_TOKENS = 256


def converted(model: str, weights: str) -> str:
    """The converted model's folder, with weights of fp32 or int8."""
    folder = Path(model).absolute()
    target = folder.with_name(f"{folder.name}-openvino-{weights}")
    if not (target / "openvino_model.xml").exists():
        program = str(Path(sys.executable).with_name("optimum-cli"))
        task = ("--task", "text-generation-with-past", "--weight-format", weights)
        command = [program, "export", "openvino", "--model", str(folder), *task, str(target)]
        subprocess.run(command, check=True, stdout=sys.stderr)  # noqa: S603
    return str(target)


def main() -> None:
    options = arguments()
    requests = read_requests(options.workload)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = options.max_running
    scheduler.max_num_batched_tokens = _MAX_BATCHED_TOKENS
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1  # GiB
    precision = _PRECISIONS[options.dtype]
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        converted(options.model, "int8" if options.dtype == "int8" else "fp32"),
        scheduler,
        "CPU",
        {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision},
    )
    run(pipeline, [request | {"max_tokens": 4} for request in requests[:4]])
    run(pipeline, requests).write(options.json)


def run(pipeline: openvino_genai.ContinuousBatchingPipeline, requests: list[Request]) -> Record:
    record = Record(len(requests))
    handles = []
    for number, request in enumerate(requests):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([request["prompt_token_ids"]], dtype=np.int64))
        handles.append(pipeline.add_request(number, prompt, config))
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for number, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    record.add(number, list(output.generated_ids))
    return record


if __name__ == "__main__":
    main()
