-- Changes of breakers that no process has taken note of yet. What is answered here is answered to nobody else.
select group_id as "group", was, became, generation, cause, at, until from control.take_breaker_events_v1()
