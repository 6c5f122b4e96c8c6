-- any() -> boolean: has there ever been a key?
select exists (select from control.api_key)
