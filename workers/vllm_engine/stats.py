"""vLLM's reports about its steps."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from workers.engine.report import StepReport


class Stats(StatLoggerBase):  # type: ignore[misc]  # vLLM is not installed here
    """vLLM's report about its last step. Fields that a version does not have count as 0."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.num_running = self.num_waiting = 0
        self.kv_usage = 0.0
        self.num_prompt_tokens = self.num_output_tokens = self.num_preempted = 0
        self.num_prefix_queries = self.num_prefix_hits = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.num_waiting = scheduler_stats.num_waiting_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
            prefix = scheduler_stats.prefix_cache_stats
            self.num_prefix_queries += prefix.queries
            self.num_prefix_hits += prefix.hits
        if iteration_stats is not None:
            self.num_prompt_tokens += iteration_stats.num_prompt_tokens
            self.num_output_tokens += iteration_stats.num_generation_tokens
            self.num_preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass

    def take(self, report: StepReport, num_blocks: int) -> None:
        """Moves what was counted since the last report into this one."""
        report.num_running, report.num_waiting = self.num_running, self.num_waiting
        report.num_free_blocks = round(num_blocks * (1.0 - self.kv_usage))
        report.num_decode_tokens = report.num_step_seqs = self.num_output_tokens
        report.num_step_tokens = self.num_output_tokens + self.num_prompt_tokens
        report.num_preemptions = self.num_preempted
        report.num_prefix_queries = self.num_prefix_queries
        report.num_prefix_hits = self.num_prefix_hits
        self.num_prompt_tokens = self.num_output_tokens = self.num_preempted = 0
        self.num_prefix_queries = self.num_prefix_hits = 0
