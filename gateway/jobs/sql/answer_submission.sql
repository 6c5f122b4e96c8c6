-- Complete a submission that this transaction has accepted with its answer, which is known once its lines are judged.
-- $1: submission id, $2: the answer.
update content.submission set answer = $2 where submission_id = $1
