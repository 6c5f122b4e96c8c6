-- Declare owners dead. $1 owners.
select group_id from control.bury_v1($1)
