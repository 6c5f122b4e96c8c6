-- A page of one key's ended jobs with their answers, in the order of their ids: at least one, where there is one, and no
-- more once their answers have so many bytes together.
-- $1: key, $2: after this id, $3: up to this id, $4: status, $5: session, $6: custom id (null: any), $7: how many at most,
-- $8: bytes.
select
    job_id, submission_id, line, custom_id, status, outcome, error_code, error_message, error_param, result,
    result_status
from (
    select
        next.*,
        sum(coalesce(octet_length(result), 0) + coalesce(octet_length(outcome), 0))
            over (order by job_id rows between unbounded preceding and 1 preceding) as before
    from (
        select *
        from content.job
        where
            key_id = $1 and job_id > $2 and job_id <= $3
            and status in ('succeeded', 'failed', 'cancelled', 'expired')
            and ($4::text is null or status = $4)
            and ($5::text is null or session_id = $5)
            and ($6::text is null or custom_id = $6)
        order by job_id
        limit $7::int
    ) as next
) as sized
where before is null or before < $8::bigint
order by job_id
