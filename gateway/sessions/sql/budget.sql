-- budget(key_id, session_id, usd, own, raises) -> most: control.budget_session_v1 says what each does.
select control.budget_session_v1($1::uuid, $2::text, $3::numeric, $4::boolean, $5::boolean) as most
