-- A probe has answered. $1 group, $2 ticket, $3 the generation of its grant.
select control.decide_v2($1, $2, $3)
