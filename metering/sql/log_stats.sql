-- What the attempts of a range were like, by {names} and in all. $1 to $26 as in log_filters.sql, $27 the names of tags
-- that are grouped by, $28 how many groups are wanted. Percentiles are of the successes, and each is a value that there
-- was (percentile_disc). {order} says which groups come first.
with chosen as (
    select {groups}
           i.key_id::text || '/' || i.debit_id collate "C" as request, i.status, i.state, i.usd, i.upper_bound_usd,
           i.is_fallback, i.retries, i.input_total, i.output_total, i.cache_read,
           i.cache_write_5m, i.cache_write_1h, i.reasoning,
           case when i.status = 'success' then i.first_byte_ms end as first_byte_ms,
           case when i.status = 'success' then i.total_ms end as total_ms,
           case when i.status = 'success' then i.queued_ms end as queued_ms
      from control.invocation i
     where {filters} and $27::text[] is not null
), summed as (
    select {names}{all} as is_all,
           count(*) as attempts,
           count(distinct request) as requests,
           coalesce(sum(usd), 0) as charged_usd,
           count(*) filter (where state = 'unknown') as unknown_attempts,
           coalesce(sum(upper_bound_usd) filter (where state = 'unknown'), 0) as unknown_upper_bound_usd,
           count(*) filter (where state = 'unknown' and upper_bound_usd is null) as unbounded_attempts,
           coalesce(sum(input_total), 0)::bigint as input_tokens,
           coalesce(sum(output_total), 0)::bigint as output_tokens,
           coalesce(sum(cache_read), 0)::bigint as cache_read_tokens,
           coalesce(sum(coalesce(cache_write_5m, 0) + coalesce(cache_write_1h, 0)), 0)::bigint as cache_write_tokens,
           coalesce(sum(reasoning), 0)::bigint as reasoning_tokens,
           count(*) filter (where status = 'success') as success,
           count(*) filter (where status = 'error') as error,
           count(*) filter (where status = 'timeout') as timeout,
           count(*) filter (where status = 'cancelled') as cancelled,
           count(*) filter (where status = 'not_dispatched') as not_dispatched,
           count(*) filter (where status = 'unknown') as unknown,
           count(*) filter (where is_fallback) as fallbacks,
           count(*) filter (where retries > 0) as retried,
           percentile_disc(array[0.5, 0.9, 0.99]) within group (order by first_byte_ms) as first_byte_ms,
           percentile_disc(array[0.5, 0.9, 0.99]) within group (order by total_ms) as total_ms,
           percentile_disc(array[0.5, 0.9, 0.99]) within group (order by queued_ms) as queued_ms
      from chosen
     group by {sets}
)
select *, count(*) over () - 1 as groups_in_all from summed
 order by is_all desc, {order}
 limit $28::integer + 1
