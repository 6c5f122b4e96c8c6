-- Make the groups of a configuration known. $1 its hash, then one array a column.
select control.configure_v1($1, $2, $3, $4, $5, $6, $7, $8)
