-- The next lines of a file: at least one, where there is one, and no more once they have so many bytes together.
-- $1: file id, $2: after this line, $3: how many at most, $4: bytes.
select line, text
from (
    select
        line, text,
        sum(octet_length(text)) over (order by line rows between unbounded preceding and 1 preceding) as before
    from (
        select line, text from content.file_line where file_id = $1 and line > $2::int order by line limit $3::int
    ) as next
) as sized
where before is null or before < $4::bigint
order by line
