-- What is asked for of the invocation log, as a condition on a row `i`; null asks for nothing. $1 from, $2 to (not
-- itself), $3 key, $4 session, $5 run, $6 step, $7 scope, $8 debit, $9 request, $10 provider, $11 model asked for,
-- $12 provider's model, $13 statuses, $14 state, $15 how it ended, $16 error's code, $17 its class, $18 skill, $19 tool,
-- $20 role, $21 transport, $22 tags as an object, $23 fallback or not, $24 least USD charged, $25 least ms in all,
-- $26 rows that a correction has replaced, too. Only an attempt that was unknown is corrected.
(i.granted_at >= $1::timestamptz and i.granted_at < $2::timestamptz)
and ($3::uuid is null or i.key_id = $3)
and ($4::text is null or i.session_id = $4)
and ($5::text is null or i.run_id = $5)
and ($6::text is null or i.step_id = $6)
and ($7::text is null or i.scope_id = $7)
and ($8::text is null or i.debit_id = $8)
and ($9::text is null or i.request_id = $9)
and ($10::text is null or i.provider = $10)
and ($11::text is null or i.requested_model = $11)
and ($12::text is null or i.upstream_model = $12)
and ($13::text[] is null or i.status = any ($13))
and ($14::text is null or i.state = $14)
and ($15::text is null or i.ended = $15)
and ($16::text is null or i.error_code = $16)
and ($17::text is null or i.error_class = $17)
and ($18::text is null or i.skill = $18)
and ($19::text is null or i.tool = $19)
and ($20::text is null or i.role = $20)
and ($21::text is null or i.transport = $21)
and ($22::jsonb is null or i.tags @> $22)
and ($23::boolean is null or coalesce(i.is_fallback, false) = $23)
and ($24::numeric is null or i.usd >= $24)
and ($25::integer is null or i.total_ms >= $25)
and ($26::boolean or i.state <> 'unknown'
     or (select true from control.invocation n
          where n.granted_at = i.granted_at and n.ticket_id = i.ticket_id and n.correction > i.correction
          limit 1) is null)
