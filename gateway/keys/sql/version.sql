-- version() -> version, database_time: what every process asks each second. One row by its only page.
select version, extract(epoch from clock_timestamp())::float8 as database_time
from control.api_key_version
