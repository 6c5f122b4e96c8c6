-- A message was taken, or is given up.
-- $1: its id.
delete from content.webhook where webhook_id = $1
