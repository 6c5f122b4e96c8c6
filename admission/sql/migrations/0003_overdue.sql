-- Only for the question it answers. Small and never read in order, it looked cheap to a planner that wanted any row that
-- waits in a group, and each such question then read all that wait. A query that means it says `> '-infinity'`.
drop index control.ticket_overdue;
create index ticket_overdue on control.ticket (group_id, queue_deadline)
    where state = 'queued' and queue_deadline > '-infinity';

-- Those not seen for long are looked for by every sweep.
create index fence_seen on control.fence (seen_at);
