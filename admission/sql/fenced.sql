-- Is there a newer executor of a run? $1 key, $2 scope, $3 run, $4 its own number.
select exists (select from control.fence f
                where f.key_id = $1 and f.scope_id = $2 and f.run_id = $3 and f.number > $4)
