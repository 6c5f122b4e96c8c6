-- Which running jobs of this process are to be taken back.
-- $1: owner.
select job_id from content.job where owner = $1 and status = 'running' and cancel_requested
