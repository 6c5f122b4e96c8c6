-- Files of lines, and batches: groups of jobs that were submitted by a file. A batch's jobs have the ids that follow its
-- own, in line order, like those of any submission.

create table content.file (
    file_id uuid primary key,
    key_id uuid not null,
    filename text not null,
    purpose text not null check (purpose in ('batch', 'batch_output')),
    -- 'uploading': its lines are still coming, and nobody sees it. 'deleted': nobody sees it any more.
    state text not null check (state in ('uploading', 'ready', 'deleted')),
    bytes bigint not null default 0,
    -- An output has no lines of its own: they are made from the jobs of this batch,
    batch_id uuid,
    -- from those that succeeded, or from the others.
    failures boolean,
    created_at timestamptz not null,
    expires_at timestamptz not null,
    constraint output_has_batch check ((purpose = 'batch_output') = (batch_id is not null and failures is not null))
);

create index file_list on content.file (key_id, file_id) where state = 'ready';
create index file_retention on content.file (expires_at);

-- The text of a file, cut behind its line feeds: joined in order the lines are the file. Empty lines stand before the
-- next one that is not.
create table content.file_line (
    file_id uuid not null,
    line integer not null check (line > 0),
    text bytea not null,
    primary key (file_id, line)
);

create table content.batch (
    batch_id uuid primary key,
    key_id uuid not null,
    -- No job of this batch has a higher id.
    last_job_id uuid not null,
    input_file_id uuid not null,
    endpoint text not null,
    completion_window text not null,
    -- JSON text: an object of strings.
    metadata text,
    -- Seconds after its end at which the outputs go; null: with the jobs.
    output_retention_s float8,
    status text not null check (
        status in (
            'validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', 'cancelled'
        )
    ),
    -- JSON text: the faults of the lines, where the file was refused.
    errors text,
    total integer not null default 0,
    -- Known when it has ended. Until then they are counted.
    completed integer,
    failed integer,
    -- JSON text: the sums of what its jobs used, where that is known.
    usage text,
    output_file_id uuid,
    error_file_id uuid,
    created_at timestamptz not null,
    deadline_at timestamptz not null,
    in_progress_at timestamptz,
    finalizing_at timestamptz,
    cancelling_at timestamptz,
    ended_at timestamptz,
    expires_at timestamptz,
    constraint ended_has_times check (
        (status in ('validating', 'in_progress', 'finalizing', 'cancelling')) = (ended_at is null)
        and (ended_at is null) = (expires_at is null)
    ),
    constraint ended_has_counts check (ended_at is null or (completed is not null and failed is not null))
);

create index batch_list on content.batch (key_id, batch_id);
create index batch_open on content.batch (input_file_id)
where status in ('validating', 'in_progress', 'finalizing', 'cancelling');
create index batch_retention on content.batch (expires_at) where expires_at is not null;

-- Where the request of a job is, that has no body of its own: in the line of this file that has its number.
alter table content.job add column file_id uuid;

-- Whether a batch has jobs that have not ended is asked again and again: those that have are not to be read for it.
create index job_of_batch on content.job (submission_id)
where file_id is not null and status in ('queued', 'running');
