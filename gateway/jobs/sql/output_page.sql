-- The next ended jobs of a batch, in line order: at least one, where there is one, and no more once their answers have
-- so many bytes together.
-- $1: key, $2: after this id, $3: up to this id, $4: those that did not succeed, $5: how many at most, $6: bytes.
select
    job_id, submission_id, line, custom_id, status, outcome, error_code, error_message, error_param, result,
    result_status, expires_at
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
            and status = any (
                case when $4::boolean then array['failed', 'cancelled', 'expired'] else array['succeeded'] end
            )
        order by job_id
        limit $5::int
    ) as next
) as sized
where before is null or before < $6::bigint
order by job_id
