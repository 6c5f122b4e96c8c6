-- Keeps these. A request that is made again under its id, as a job's is, has its last. $1 seconds; then arrays.
insert into content.capture (request_id, key_id, debit_id, transport, model, session_id, ended, request, request_bytes,
                             answer, answer_bytes, expires_at)
select distinct on (e.request_id) e.*, clock_timestamp() + $1::float8 * interval '1 second'
  from unnest($2::text[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
              $10::bigint[], $11::text[], $12::bigint[])
       as e (request_id, key_id, debit_id, transport, model, session_id, ended, request, request_bytes, answer,
             answer_bytes)
on conflict (request_id) do update
   set ended = excluded.ended, request = excluded.request, request_bytes = excluded.request_bytes,
       answer = excluded.answer, answer_bytes = excluded.answer_bytes, captured_at = clock_timestamp(),
       expires_at = excluded.expires_at
