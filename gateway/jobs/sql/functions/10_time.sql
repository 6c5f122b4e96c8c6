-- The time that jobs are due, overdue and forgotten by. It is the store's (control.now_v1), which neither returns nor
-- stands still when the server's clock is set: what is set and compared here is of that time, and what is shown is of the
-- server's own clock. A step may be noticed by nobody yet. So the process says what the time must be, by what it was told
-- and its own steady clock, and after how many steps that was: where nothing has been made up for since and the two are
-- apart, the process is believed. Without this a job that is submitted just then would be due, or overdue, by the step.
--
-- A message that was long on its way looks like a step forward; so does a slow host. Only what no message takes counts.
create or replace function content.time_v1(p_known timestamptz, p_steps bigint)
returns table (now timestamptz, wall timestamptz)
language sql volatile rows 1 as $$
    select case when s.steps = p_steps
                     and w.wall + s.ahead - p_known not between interval '-1 second' and interval '1 minute'
                then p_known else w.wall + s.ahead end,
           w.wall
      from control.store s, (select clock_timestamp() as wall offset 0) w
$$;
