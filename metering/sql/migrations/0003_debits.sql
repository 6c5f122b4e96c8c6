-- The attempts know the debits, and what the ledger has of one is found by its attempt.

drop index control.invocation_debit;
