-- What the runs of a process have come to: functions/40_steps.sql.
-- $1: owner, $2: retention in seconds, $3 and $4: see content.time_v1, then arrays: $5 to $7 attempts, $8 to $12 answers,
-- $13 to $22 ends, $23 to $31 jobs that go back.
select step, job_id, claims, said
from content.steps_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,
                      $22, $23, $24, $25, $26, $27, $28, $29, $30, $31)
