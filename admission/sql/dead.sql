-- Which of these owners will never write again. $1 owners; and what is known of the time.
select o as owner_id
  from (select control.keep_time_v2($2, $3, $4, $5, null) as now offset 0) t, unnest($1::uuid[]) o
 where control.owner_is_dead_v1(o, t.now)
