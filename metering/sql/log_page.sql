-- One piece of the invocation log, newest first: of the next {size} rows that an index leads to, those that are asked
-- for. What a piece reads is bounded by its size, whatever the filters let through.
-- $1 to $26 as in log_filters.sql; $27, $28, $29 the place (granted_at, ticket_id, correction) before which it begins,
-- $30 how many are wanted. {source}, {driver}, {first} and {as} say which index: `metering.log` has
-- them, and why.
-- Each row has where the piece ended and how many rows it read. A piece without finds is one row without a ticket.
with piece as materialized (
    select i.*
      from {source}
     where {driver}
       and i.granted_at >= $1 and i.granted_at <= $27
       and (i.granted_at, i.ticket_id{as}, i.correction) < ($27, $28::uuid{as}, $29::smallint)
     order by {first}i.granted_at desc, i.ticket_id{as} desc, i.correction desc
     limit {size}
), found as (
    select i.* from piece i
     where {filters}
     order by i.granted_at desc, i.ticket_id desc, i.correction desc
     limit $30
), last as (
    select p.granted_at, p.ticket_id, p.correction, count(*) over () as rows
      from piece p order by p.granted_at, p.ticket_id, p.correction limit 1
)
select l.rows as piece_rows, l.granted_at as piece_granted_at, l.ticket_id as piece_ticket_id,
       l.correction as piece_correction, f.*
  from last l left join found f on true
 order by f.granted_at desc, f.ticket_id desc, f.correction desc
