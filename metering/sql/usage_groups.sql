-- The sums of each group of a question of usage, a page of them in order, and of all it asks for, in one snapshot.
-- `metering.grouping` fills the braces, with expressions of its own and the numbers of parameters: nothing of a caller
-- stands in the text.
with used as {hold} (
    select u.*
      from ({source}
            union all
            {at_work}) as u
     where {filters}
), grouped as materialized (
    select {dimensions} as dimensions,
           sum(u.charged_usd) as charged_usd, sum(u.attempts)::bigint as attempts,
           sum(u.unknown_attempts)::bigint as unknown_attempts,
           sum(u.unknown_upper_bound_usd) as unknown_upper_bound_usd,
           sum(u.unbounded_attempts)::bigint as unbounded_attempts,
           sum(u.reserved_attempts)::bigint as reserved_attempts, sum(u.reserved_usd) as reserved_usd,
           sum(u.unbounded_reserved)::bigint as unbounded_reserved,
           sum(u.input_tokens)::bigint as input_tokens, sum(u.output_tokens)::bigint as output_tokens
      from used u {each}
     where {grouped}
     group by 1
    -- What is left of what no run or tag has is nothing, often.
    having (sum(u.charged_usd), sum(u.attempts), sum(u.unknown_attempts), sum(u.unknown_upper_bound_usd),
            sum(u.unbounded_attempts), sum(u.reserved_attempts), sum(u.input_tokens), sum(u.output_tokens))
           <> (0, 0, 0, 0, 0, 0, 0, 0)
), page as (
    select g.* from grouped g
     where {after} is null or g.dimensions > {after} collate "C"
     order by g.dimensions collate "C" limit {limit}
)
select answer.* from (
select false as whole, p.* from page p
union all
select true, null, coalesce(sum(u.charged_usd), 0), coalesce(sum(u.attempts), 0)::bigint,
       coalesce(sum(u.unknown_attempts), 0)::bigint, coalesce(sum(u.unknown_upper_bound_usd), 0),
       coalesce(sum(u.unbounded_attempts), 0)::bigint, coalesce(sum(u.reserved_attempts), 0)::bigint,
       coalesce(sum(u.reserved_usd), 0), coalesce(sum(u.unbounded_reserved), 0)::bigint,
       coalesce(sum(u.input_tokens), 0)::bigint, coalesce(sum(u.output_tokens), 0)::bigint
  from {summed} u
 where {counted}
) answer
 order by answer.whole, answer.dimensions collate "C"
