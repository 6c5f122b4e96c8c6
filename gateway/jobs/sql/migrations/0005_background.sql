-- A response that was asked for in the background is a job, and is looked up as a response: what it repeats of its request,
-- JSON text. Null: the job is looked up as a job alone.
alter table content.job add column response_head text;
