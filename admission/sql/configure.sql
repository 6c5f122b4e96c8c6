-- Make groups and their limits known. $1 revision, then one array a column.
select group_id from control.configure_v1($1, $2, $3, $4, $5, $6, $7, $8)
