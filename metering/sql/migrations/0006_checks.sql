-- The server reads the text of a check anew for each statement that writes, and that of a list of words is long. What the
-- one function that writes these tables keeps to by itself is not checked a second time.

-- The kinds are spelled in that function alone.
alter table control.counter drop constraint counter_kind_check;

alter table control.invocation
    -- It is that of the attempt's row, which is written with it and has the check.
    drop constraint invocation_state_check,
    -- A word that is none of them is written as null, which the column refuses.
    drop constraint invocation_status_check,
    drop constraint invocation_usd_check,
    drop constraint invocation_upper_bound_usd_check,
    drop constraint invocation_list_usd_check,
    -- The three in one. Every row that is there has passed them.
    add constraint amounts_in_range check (
        least(usd, upper_bound_usd, list_usd) >= 0 and greatest(usd, upper_bound_usd, list_usd) < 1e9) not valid;
