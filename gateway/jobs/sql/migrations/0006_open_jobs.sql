-- Whether a batch has jobs that have not ended is found by the first of its lines. In their order, which no other way of
-- reading the table gives: the planner knows how many jobs are open, and not that all of them may be behind those that have
-- ended, and with nothing to sort by it would rather read the table until it meets one.
drop index content.job_of_batch;
create index job_of_batch on content.job (submission_id, line)
where file_id is not null and status in ('queued', 'running');
