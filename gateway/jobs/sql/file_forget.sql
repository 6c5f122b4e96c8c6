-- Remove a file that was taken away or never finished, with its lines.
-- $1: file id.
with gone as (delete from content.file where file_id = $1 and state <> 'ready')
delete from content.file_line
where file_id = $1 and not exists (select from content.file where file_id = $1 and state = 'ready')
