-- Which of these owners will never write again. $1 owners.
select o as owner_id from unnest($1::uuid[]) o where control.owner_is_dead_v1(o, control.now_v1())
