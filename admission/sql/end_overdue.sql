-- End the backends of admission whose transaction is older than any may be. $1 seconds.
select count(*) filter (where pg_terminate_backend(a.pid))
  from pg_stat_activity a
 where a.application_name = 'tollbridge admission' and a.pid <> pg_backend_pid() and a.state <> 'idle'
   and a.xact_start < clock_timestamp() - $1::double precision * interval '1 s'
