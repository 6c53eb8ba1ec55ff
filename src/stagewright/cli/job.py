"""The job as options of the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from stagewright.cli import options
from stagewright.cli.from_file import job_keys

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.export.reading import Reading
    from stagewright.planning.job import Job
    from stagewright.tracing.models.reference import ModelReference

_NOT_OF_JOB = {"job", "profile", "record"}


@dataclass(frozen=True)
class JobOptions:
    """The job."""

    global_batch: options.GlobalBatch = None
    sequence_length: options.JobSequenceLength = None
    dtype: options.Dtype = None
    job: options.JobFile = None
    compiled: options.Compiled = False
    memory_limit: options.MemoryLimit = None
    runtime: options.RuntimeName = None
    profile: options.Profile = None
    record: options.RecordFile = None

    def keys(self) -> dict[str, Any]:
        """Return the keys of the job; None if not given."""
        names = (field.name for field in fields(self) if field.name not in _NOT_OF_JOB)
        keys: dict[str, Any] = {name: getattr(self, name) for name in names}
        return keys | {"compiled": self.compiled or None}

    def read(self, model: ModelReference, reading: Reading | None = None, dp: int = 1) -> Job:
        """Return the job, with a file's values for options not given; `dp` are the replicas that the file is for.

        Raises:
            InputError: a key is missing or wrong.
        """
        keys = self.keys() if reading is None else job_keys(reading, dp, **self.keys())
        return options.read_job(self.job, model, **keys)

    def measured(self, cluster: Cluster) -> Cluster:
        """Return `cluster` with the measurements of the profile and the record."""
        return options.as_measured(cluster, self.profile, self.record)
