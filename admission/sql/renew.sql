-- Register an owner or its heartbeat. $1 owner, $2 its process, $3 time to live in ms, $4 first, $5 host, $6 process id.
select control.renew_v1($1, $2, $3, $4, $5, $6)
