-- A message is to be sent again later. Acts only for the try that failed.
-- $1: its id, $2: which try, $3: seconds, $4 and $5: see content.time_v1.
update content.webhook
set due_at = clock.now + make_interval(secs => $3::float8)
from content.time_v1($4, $5) as clock
where webhook_id = $1 and attempts = $2
