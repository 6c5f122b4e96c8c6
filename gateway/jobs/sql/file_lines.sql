-- Lines of a file that is being uploaded.
-- $1: file id, then arrays: $2 numbers, $3 texts.
insert into content.file_line (file_id, line, text)
select $1, said.line, said.text
from unnest($2::int[], $3::bytea[]) as said (line, text)
