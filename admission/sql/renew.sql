-- Register an owner or its heartbeat. $1 owner, $2 its process, $3 time to live in ms, $4 first, $5 host, $6 process id,
-- $7 the longest hold in ms; and what is known of the time.
select lives_ms, clock, steps from control.renew_v2($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
