-- Register an owner or its heartbeat. $1 owner, $2 time to live in ms, $3 first, $4 host, $5 process id.
select control.renew_v1($1, $2, $3, $4, $5)
