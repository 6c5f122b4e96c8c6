-- Declare owners dead. $1 owners.
select group_id from control.bury_v2($1)
