-- The other processes that hold running jobs.
-- $1: this process's incarnation.
select distinct owner from content.job where status = 'running' and owner <> $1
