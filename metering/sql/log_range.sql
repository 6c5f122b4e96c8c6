-- A range of the invocation log in the database's time. $1, $2 the first moment and the one after the last, $3, $4 the
-- first and the last day in the zone $5, each or null; $6 how long the range is where it has no beginning, or null.
with asked as (
    select coalesce($1::timestamptz, ($3::date)::timestamp at time zone $5) as from_at,
           coalesce($2::timestamptz, ($4::date + 1)::timestamp at time zone $5) as to_at
)
select coalesce(from_at, coalesce(to_at, clock_timestamp()) - $6::interval) as from_at, to_at from asked
