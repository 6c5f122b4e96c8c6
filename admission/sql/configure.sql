-- Make groups, limits and endpoints known. $1 revision, $2 groups, $3 endpoints.
select name from control.configure_v2($1, $2, $3)
