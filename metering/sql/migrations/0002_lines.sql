-- The settlement hands over finished lines.

drop function if exists control.record_v1(smallint, uuid[], text[], text[], jsonb[]);
