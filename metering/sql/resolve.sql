-- Corrects these attempts where their cost is unknown, once, each on its own day; the ones that it was. Their slots are
-- not touched: that somebody knows what an attempt cost proves nothing of its end. $1 tickets, $2 states, $3 records.
select r.ticket_id
  from control.record_v2(0::smallint, control.correct_v2($1::uuid[], $1::uuid[], $2::text[], $3::text[])) r
