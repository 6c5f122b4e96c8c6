-- The first day of which all runs, steps and tags are counted; null: none was dropped.
select max(f.before) as kept_from from control.forgotten f where f.what <> 'log'
