-- Persist jobs, and refused lines as failed ones. Repeating it with the same ids changes nothing, so a lost
-- acknowledgement is answered by sending it again.
-- $1..$16: one array per column, $17: retention in seconds, for refused lines,
-- $18 and $19: see content.time_v1, $20: the file that has the request of a job without a body,
-- $21: who is told of its end, $22: what it repeats of its request, where it is looked up as a response.
insert into content.job (
    job_id, key_id, submission_id, line, custom_id, url, model, session_id, klass, body, options, attempts_allowed,
    status, created_at, not_before, deadline_at, error_code, error_message, error_param, ended_at, expires_at, file_id,
    webhook_url, response_head
)
select
    n.job_id, n.key_id, n.submission_id, n.line, n.custom_id, n.url, n.model, n.session_id, n.klass, n.body, n.options,
    n.attempts_allowed,
    case when n.error_code is null then 'queued' else 'failed' end,
    clock.wall, clock.now, clock.now + make_interval(secs => n.deadline_s),
    n.error_code, n.error_message, n.error_param,
    case when n.error_code is not null then clock.wall end,
    case when n.error_code is not null then clock.now + make_interval(secs => $17::float8) end,
    n.file_id, n.webhook_url, n.response_head
from
    unnest(
        $1::uuid[], $2::uuid[], $3::uuid[], $4::int[], $5::text[], $6::text[], $7::text[], $8::text[], $9::smallint[],
        $10::text[], $11::text[], $12::int[], $13::float8[], $14::text[], $15::text[], $16::text[], $20::uuid[],
        $21::text[], $22::text[]
    ) as n (
        job_id, key_id, submission_id, line, custom_id, url, model, session_id, klass, body, options, attempts_allowed,
        deadline_s, error_code, error_message, error_param, file_id, webhook_url, response_head
    ),
    content.time_v1($18, $19) as clock
on conflict (job_id) do nothing
