-- The time that jobs are due, overdue and forgotten by. It is the store's (control.now_v1), which neither returns nor
-- stands still when the server's clock is set: what is set and compared here is of that time, and what is shown is of the
-- server's own clock. A step may be noticed by nobody yet. So the process says what the time must be, by what it was told
-- and its own steady clock, and after how many steps that was: where nothing has been made up for since and the two are
-- apart, the process is believed. Without this a job that is submitted just then would be due, or overdue, by the step.
--
-- A message that was long on its way looks like a step forward; so does a slow host. Only what no message takes counts.
--
-- In plpgsql, whose plan a session keeps: that of a function in SQL is made anew in each statement.
create or replace function content.time_v1(p_known timestamptz, p_steps bigint)
returns table (now timestamptz, wall timestamptz)
language plpgsql volatile rows 1 as $$
#variable_conflict use_column
declare
    v_store control.store;
begin
    select s.* into v_store from control.store s;
    if not found then
        return;
    end if;
    wall := clock_timestamp();
    now := wall + v_store.ahead;
    if v_store.steps = p_steps and now - p_known not between interval '-1 second' and interval '1 minute' then
        now := p_known;
    end if;
    return next;
end
$$;
