"""Interrupts a job at every position of its log."""

from dataclasses import dataclass

from contract.jobs import Job
from tests.resume.local_worker import LocalWorker
from tests.resume.logged_job import LoggedJob
from workers.engine.grammar import Grammars
from workers.engine.interface import LoadedModel
from workers.ipc.messages import EngineOptions
from workers.supervisor.held_job import HeldJob


@dataclass(frozen=True, slots=True)
class Workers:
    """How the workers of a test are built: each with its own engine, around one model."""

    loaded: LoadedModel
    options: EngineOptions
    held_type: type[HeldJob] = HeldJob
    grammars: Grammars | None = None

    def run(self, *jobs: LoggedJob, max_events: int | None = None) -> None:
        LocalWorker(self.loaded, self.options, self.held_type, max_events, self.grammars).run(jobs)

    def undisturbed(self, job: Job) -> LoggedJob:
        """The job without interruption, with one event for each of its steps."""
        logged = LoggedJob(job)
        self.run(logged)
        return logged

    def passed_on_at_every_event(self, job: Job) -> LoggedJob:
        """The job run by a sequence of workers, each of which dies after one event."""
        logged = LoggedJob(job)
        while not logged.has_ended:
            self.run(logged, max_events=1)
        return logged
