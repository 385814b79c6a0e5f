"""transformers' own continuous batching."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.peers.adapters.record import Record, Request, arguments, read_requests

_PAGE_TOKENS = 16
_NUM_PAGES = 2048


def main() -> None:
    options = arguments()
    requests = read_requests(options.workload)
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="paged|sdpa"
    )
    model.eval()
    with torch.inference_mode():
        run(model, [r | {"max_tokens": 4} for r in requests[:4]], options.max_running)
        run(model, requests, options.max_running).write(options.json)


def run(model: Any, requests: list[Request], max_running: int) -> Record:
    batching = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=_NUM_PAGES,
        max_batch_tokens=512,
        max_requests_per_batch=max_running,
        allow_block_sharing=False,
    )
    config_class: Any = GenerationConfig
    config = config_class(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(config, batching)
    manager.start()
    record = Record(len(requests))
    for number, request in enumerate(requests):
        manager.add_request(
            request["prompt_token_ids"],
            request_id=str(number),
            max_new_tokens=request["max_tokens"],
            streaming=True,
            eos_token_id=-1,
        )
    num_left = len(requests)
    while num_left:
        result = manager.get_result(timeout=600)
        assert result is not None, "transformers' batching has stopped"
        assert not result.error, result.error
        number = int(result.request_id)
        record.add(number, list(result.generated_tokens)[record.num_tokens(number) :])
        num_left -= result.is_finished()
    manager.stop(block=True)
    return record


if __name__ == "__main__":
    main()
