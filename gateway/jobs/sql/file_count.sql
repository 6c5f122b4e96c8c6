-- How many lines a file has.
-- $1: file id.
select count(*)::int from content.file_line where file_id = $1
