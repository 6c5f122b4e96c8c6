-- Declare owners dead. $1 owners; and what is known of the time.
select group_id from control.bury_v2($1, $2, $3, $4, $5)
