-- lock(): one process at a time decides about first keys. Conflicts with every writer of the table and with no reader.
lock table control.api_key in share row exclusive mode
