-- The store's time, and how many steps of the server's clock it has made up for.
-- $1 and $2: see content.time_v1. A step since they were sent is not taken for the time.
select t.now, s.steps from control.store s, content.time_v1($1, $2) t
