-- What ends is told, whichever statement ends it: a message that a statement had to remember would some day be forgotten.
-- Those of batches and of responses in the background are OpenAI's webhook events, so that its client can read them; those of
-- jobs are of the same shape and our own.
create or replace function content.tell_v1(p_url text, p_type text, p_data json) returns void
language sql volatile as $$
    insert into content.webhook (webhook_id, url, payload, created_at, due_at)
    select event.id, p_url,
           json_build_object(
               'id', 'evt_' || replace(event.id::text, '-', ''),
               'object', 'event',
               'created_at', extract(epoch from clock.wall)::bigint,
               'type', p_type,
               'data', p_data
           )::text,
           clock.now, clock.now
      from content.time_v1(null, null) as clock, (select gen_random_uuid() as id offset 0) as event
$$;

create or replace function content.tell_job_v1() returns trigger
language plpgsql as $$
declare
    v_status text;
begin
    if new.response_head is not null then
        v_status := case
            when new.status = 'cancelled' then 'cancelled'
            when new.status <> 'succeeded' then 'failed'
            -- Without its escapes: one of them, \u0000, no text here can hold, and an end must not fail at it.
            when regexp_replace(new.result, '\\.', '', 'g')::json ->> 'status' = 'incomplete' then 'incomplete'
            else 'completed' end;
        perform content.tell_v1(new.webhook_url, 'response.' || v_status, json_build_object(
            'id', 'resp_bg_' || replace(new.job_id::text, '-', ''),
            'object', 'response',
            'status', v_status,
            'error_code', new.error_code
        ));
        return null;
    end if;
    perform content.tell_v1(new.webhook_url, 'job.' || new.status, json_build_object(
        'id', new.job_id,
        'object', 'job',
        'submission_id', new.submission_id,
        'custom_id', new.custom_id,
        'status', new.status,
        'error_code', new.error_code
    ));
    return null;
end
$$;

create or replace function content.tell_batch_v1() returns trigger
language plpgsql as $$
begin
    perform content.tell_v1(new.webhook_url, 'batch.' || new.status, json_build_object(
        'id', 'batch_' || replace(new.batch_id::text, '-', ''),
        'object', 'batch',
        'status', new.status,
        'request_counts', json_build_object('total', new.total, 'completed', new.completed, 'failed', new.failed)
    ));
    return null;
end
$$;

create or replace trigger job_told after update of status on content.job
for each row when (new.webhook_url is not null and old.ended_at is null and new.ended_at is not null)
execute function content.tell_job_v1();

create or replace trigger batch_told after update of status on content.batch
for each row when (new.webhook_url is not null and old.ended_at is null and new.ended_at is not null)
execute function content.tell_batch_v1();
