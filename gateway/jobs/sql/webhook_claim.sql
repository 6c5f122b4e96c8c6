-- Messages that are due, to be sent now. Should their process die, they are due again.
-- $1: how many at most, $2: seconds that a try may take, $3 and $4: see content.time_v1.
with clock as materialized (select now from content.time_v1($3, $4)),
due as materialized (
    select webhook_id
    from content.webhook
    where due_at <= (select now from clock)
    order by due_at
    limit $1::int
    for update skip locked
)
update content.webhook as webhook
set attempts = webhook.attempts + 1, due_at = clock.now + make_interval(secs => $2::float8)
from clock, due
where webhook.webhook_id = due.webhook_id
returning
    webhook.webhook_id, webhook.url, webhook.payload, webhook.attempts,
    extract(epoch from clock.now - webhook.created_at)::float8 as age_s
