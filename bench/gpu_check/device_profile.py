"""Where the time of a step goes: the kernels that take most of it, by torch's profiler."""

from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench.gpu_check.decoding import steady
from bench.gpu_check.served import Served
from bench.gpu_check.sizes import Sizes

_NUM_KERNELS = 25


def profile_steps(served: Served, sizes: Sizes, num_streams: int) -> dict[str, Any]:
    """Returns seconds per step: `step_s` without the profiler, `device_s` the sum of its kernels.
    Without a GPU torch's operations take the place of kernels."""
    is_cuda = served.machine.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    num_steps = sizes.steady_steps
    with steady(served, sizes, num_streams) as streams:
        step_s = streams.step_s(num_steps)
        with profile(activities=[activity], acc_events=True) as recorded:
            streams.run(num_steps)
            served.machine.wait()
    kernels = []
    for event in recorded.key_averages():
        # Calls of CUDA's runtime are the host's; they stand among the kernels.
        if event.device_type.name == activity.name:
            total_us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
            kernels.append((total_us / 1e6 / num_steps, event.count / num_steps, event.key))
    kernels.sort(reverse=True)
    device_s = sum(seconds for seconds, _, _ in kernels)
    return {
        "step_s": step_s,
        "device_s": device_s,
        "num_kernels": sum(calls for _, calls, _ in kernels),
        "kernels": [
            {"name": name, "calls": calls, "s": seconds, "share": seconds / device_s}
            for seconds, calls, name in kernels[:_NUM_KERNELS]
        ],
    }
