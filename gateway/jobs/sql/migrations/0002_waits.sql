-- Which capacity groups a queued job was refused by, or failed in, the one that its reason is about first. When an
-- operator resets one of them, those that wait for it are due.
alter table content.job add column wait_groups text[];

create index job_waits on content.job (not_before) where status = 'queued' and wait_groups is not null;
