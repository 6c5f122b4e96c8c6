-- The attempts of one debit that were granted. $1 key, $2 debit.
select ticket_id, attempt, state from control.attempt where key_id = $1 and debit_id = $2 order by attempt
