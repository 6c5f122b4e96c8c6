-- Who holds the oldest snapshot in this database, and for how long.
select coalesce(a.application_name, '') as application_name,
       extract(epoch from clock_timestamp() - a.xact_start)::double precision as age_s
  from pg_stat_activity a
 where a.backend_xmin is not null and a.datname = current_database() and a.xact_start is not null
   and a.pid <> pg_backend_pid()
 order by a.xact_start
 limit 1
