-- The partitions of this month and the next. A month whose rows already went to the default partition stays there.
create or replace function control.partition_invocations_v1() returns void
language plpgsql as $$
declare
    v_month date;
begin
    perform pg_advisory_xact_lock(hashtext('tollbridge.partition'));
    for v_month in select (date_trunc('month', clock_timestamp() at time zone 'UTC') + n * interval '1 month')::date
                     from generate_series(0, 1) n
    loop
        if to_regclass(format('control.invocation_%s', to_char(v_month, 'YYYY_MM'))) is null
           and not exists (select from control.invocation_default i
                            where i.granted_at >= v_month::timestamp at time zone 'UTC'
                              and i.granted_at < (v_month + interval '1 month') at time zone 'UTC') then
            execute format('create table control.%I partition of control.invocation for values from (%L) to (%L)',
                           'invocation_' || to_char(v_month, 'YYYY_MM'),
                           v_month::timestamp at time zone 'UTC', (v_month + interval '1 month') at time zone 'UTC');
        end if;
    end loop;
end $$;
