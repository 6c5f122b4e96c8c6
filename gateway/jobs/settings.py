"""How jobs are run and kept. The gateway's configuration fills this in; tests shrink it."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=10_000_000_000)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=10_000_000_000)]


class JobsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All times in seconds."""

    #: Jobs in flight in one process. What a provider may take at once is admission's business.
    concurrency: Count = 64
    #: The deadline of a job that names none.
    deadline_s: Seconds = 86_400.0
    longest_deadline_s: Seconds = 30 * 86_400.0
    #: Runs of a job that names no number: a run that every route failed, for reasons that may pass, is run again.
    max_attempts: Count = 3
    most_attempts: Count = 10
    #: Claims that may die with their process before the job is taken for the cause.
    poison_claims: Count = 5
    #: Between looks for due jobs: from the first to the second while there are none.
    poll_shortest_s: Seconds = 0.05
    poll_longest_s: Seconds = 1.0
    #: Between looks for requests to cancel what runs here.
    cancel_poll_s: Seconds = 0.5
    #: Between looks for the end of jobs that callers wait for.
    watch_poll_s: Seconds = 0.25
    #: Between rounds that expire jobs and recover those of dead processes.
    upkeep_s: Seconds = 2.0
    #: Between rounds that delete what is past its retention.
    purge_s: Seconds = 3600.0
    #: How long the write before a dispatch, and the one of an answer, is tried while the store is away.
    write_patience_s: Seconds = 10.0
    #: At least so long before a job that was refused for now is due again. A full queue is another matter: the job
    #: keeps its place, and this process leaves its model alone for `full_hold_s`.
    refused_delay_s: Seconds = 0.5
    full_hold_s: Seconds = 0.1
    #: How long at most this process leaves a model alone after another refusal.
    refused_hold_s: Seconds = 1.0
    #: Before a run that failed is repeated: the first time, and at most. Doubles in between.
    retry_delay_s: Seconds = 2.0
    retry_longest_s: Seconds = 60.0
    #: How long an ended job and its content are kept.
    retention_s: Seconds = 30 * 86_400.0
    #: How long an Idempotency-Key stands for its submission.
    idempotency_retention_s: Seconds = 60 * 86_400.0
    max_lines: Count = 50_000
    max_line_bytes: Count = 8 * 1024 * 1024
    #: What a submission has beyond this goes through a temporary file.
    spool_bytes: Count = 1024 * 1024
    longest_wait_s: Seconds = 60.0
    #: Bytes of a file of lines.
    max_file_bytes: Count = 200 * 1024 * 1024
    #: An upload of which nothing was heard for so long is given up.
    upload_patience_s: Seconds = 3600.0
    #: Between looks for batches that are to be validated, cancelled or ended.
    batch_poll_s: Seconds = 2.0


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the ends of jobs and batches are told. All times in seconds."""

    allowed_hosts: tuple[str, ...] = ()
    #: None: nothing is sent.
    secret: bytes | None = None
    allow_http: bool = False
    allow_private: bool = False
    #: For one try, from the look-up of the name to the status.
    timeout_s: float = 10.0
    #: Between looks for messages that are due.
    poll_s: float = 1.0
    #: Before a message is sent again: the first time, and at most. Doubles in between.
    retry_delay_s: float = 5.0
    retry_longest_s: float = 3600.0
    #: How old a message may become.
    give_up_s: float = 3 * 86_400.0
