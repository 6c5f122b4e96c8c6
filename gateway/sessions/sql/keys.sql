-- keys(session_id) -> key_id: whose sessions of this name anything is known of. Each key is looked up: what it costs grows
-- with the keys there ever were, and not with what was used.
select k.key_id
  from control.api_key k
 where exists (select from control.counter c where c.kind = 'session' and c.name = k.key_id || '/' || $1::text)
    or exists (select from control.ticket t where t.key_id = k.key_id and t.session_id = $1::text)
    or exists (select from control.session_budget b where b.key_id = k.key_id and b.session_id = $1::text)
 order by k.key_id
