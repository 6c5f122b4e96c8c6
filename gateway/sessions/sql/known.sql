-- known(key_id) -> boolean: there is, or was, such a key.
select exists (select from control.api_key k where k.key_id = $1::uuid)
