"""One action on an RQ queue: python with_rq.py SOCKET ACTION CLIENTS JOBS; prints the seconds.

Clients are threads, workers are processes. RQ has no stream of a job's output: `append` saves the
job's metadata.
"""

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable

import redis
from rq import Queue, SimpleWorker

DATA = "x" * 600


def shared(num_clients: int, num_jobs: int, call: Callable[[], object]) -> None:
    left, lock = iter(range(num_jobs)), threading.Lock()

    def one() -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            call()

    run(num_clients, one)


def run(num_threads: int, target: Callable[[], object]) -> None:
    threads = [threading.Thread(target=target) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(path: str, action: str, clients: str, jobs: str) -> None:
    client = redis.Redis(unix_socket_path=path)
    queue, num_clients, num_jobs = Queue("bench", connection=client), int(clients), int(jobs)
    start_s = time.perf_counter()
    if action == "enqueue":
        shared(num_clients, num_jobs, lambda: queue.enqueue("builtins.len", DATA))
    elif action == "finish":

        def work() -> None:
            SimpleWorker([queue], connection=client).work(
                burst=True, max_jobs=max(1, num_jobs // num_clients), logging_level="ERROR"
            )

        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=work) for _ in range(num_clients)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    else:
        job = queue.enqueue("builtins.len", DATA)

        def save() -> None:
            job.meta["text"] = "token "
            job.save_meta()

        shared(num_clients, num_jobs, save)
    print(time.perf_counter() - start_s)


main(*sys.argv[1:])
