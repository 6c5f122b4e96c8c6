-- Close a group's breaker and take its floors away. $1 group.
select control.reset_v1($1)
