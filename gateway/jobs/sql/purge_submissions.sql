-- Forget idempotency keys past their own retention, a few at a time.
-- $1: how many at most.
delete from content.submission
where submission_id in (
    select submission_id
    from content.submission
    where expires_at <= (select clock_timestamp())
    order by expires_at
    limit $1::int
    for update skip locked
)
returning submission_id
