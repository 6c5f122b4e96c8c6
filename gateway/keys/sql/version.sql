-- version() -> version, database_time: what every process asks each second. One row by its only page, and the store's
-- time: a step of the server's clock neither ends a key early nor revives it.
select version, extract(epoch from control.now_v1())::float8 as database_time
from control.api_key_version
