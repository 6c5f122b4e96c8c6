-- Which of these jobs have ended.
-- $1: job ids.
select job_id from content.job where job_id = any($1::uuid[]) and status not in ('queued', 'running')
