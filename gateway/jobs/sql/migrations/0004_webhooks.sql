-- Whom to tell of the end of a job or a batch: null, nobody.
alter table content.job add column webhook_url text;
alter table content.batch add column webhook_url text;

-- What is to be told. A row is there from the very transaction in which the job or the batch ends until somebody has
-- taken the message, or nobody has for too long.
create table content.webhook (
    -- The same for every try: by it a receiver knows a message that it has already.
    webhook_id uuid primary key,
    url text not null,
    -- JSON text, as it is sent: no prompt and no answer.
    payload text not null,
    created_at timestamptz not null,
    due_at timestamptz not null,
    attempts integer not null default 0
);

create index webhook_due on content.webhook (due_at);
