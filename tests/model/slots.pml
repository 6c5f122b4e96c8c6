/*
 * Slots: leases, quarantine and lost acknowledgements of one capacity group. `__main__.py` says what is left out.
 *
 * N requests of PROCS owners (process incarnations) share LIMIT slots. Each step below is one transaction of the store,
 * one act of a client, of the provider, or of time. Time has no length: "the hard deadline passes" may come at any
 * moment that the rules allow, and waiters are granted in any order, so what holds here holds for every choice of
 * durations, classes and floors. FAULTS bounds how many acknowledgements are lost and how many owners lapse or die;
 * what was sent may still commit at any later time, or never.
 */

#ifndef N
#define N 3
#endif
#ifndef LIMIT
#define LIMIT 2
#endif
#ifndef PROCS
#define PROCS 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif

#define OWNER(i) ((i) % PROCS)
/* Of one provider it is known that closing the connection stops the work. */
#define STOPS(i) ((i) == 1)

/* A ticket's row in the store; `none` is no row. `occupied` is what the vocabulary calls active. */
mtype = { none, queued, granted, occupied, quarantined }
/* The end of an attempt, a row of its own. A tombstone is a `zero` without a ticket. */
mtype = { absent, zero, charged, unknown }
/* A client: one request as its process sees it. `over`: nothing of it is left anywhere. */
mtype = { idle, asking, waiting, holding, streaming, reporting, reported, abandoning, done, dead, over }

/* The store. */
mtype ticket[N] = none;
mtype row[N] = absent;
bool fresh[PROCS] = true; /* the heartbeat row is younger than its time to live */

/* Time. */
bool hard[N];             /* the hard deadline has passed */
bool closed[N];           /* the connection was closed, and that is known to stop the work (cancel_confirms_after_s) */

/* The processes. */
bool trust[PROCS] = true; /* a process trusts its own leases; this ends before the store takes the owner for dead */
mtype client[N] = idle;
byte acquires[N];         /* acquires of this ticket on their way */
mtype said[N] = absent;   /* what the client reports of its attempt */
bool proven[N];           /* and that the remote end has ended, or never began */
byte reports[N];          /* settlements that say so, on their way */
bool stale[N];            /* an older settlement, "unknown", is still on its way */
byte faults = FAULTS;

/* The provider. */
bool running[N];

/* What happened, for the properties alone. */
bool dispatched[N];
bool leased[N];
bool buried[N];           /* abandoned */
byte settled[N];
byte corrected[N];
byte charges[N];          /* how often the counters were raised */
bool promised[N];         /* the store acknowledged the charge */

hidden byte k;
hidden byte live;

#define HOLDS(j)   (ticket[j] == occupied || ticket[j] == quarantined)
#define TAKEN(j)   (ticket[j] == granted || HOLDS(j))
#if N == 2
#define SUM(of)    (of(0) + of(1))
#elif N == 3
#define SUM(of)    (of(0) + of(1) + of(2))
#else
#define SUM(of)    (of(0) + of(1) + of(2) + of(3))
#endif
#define RUNS(j)    running[j]
#define OVER(j)    (client[j] == over)

/* What a grant takes for occupied. */
#if defined(BUG_QUARANTINE_IS_FREE)
#define COUNTED(j) (ticket[j] == granted || ticket[j] == occupied)
#elif defined(BUG_UNCONFIRMED_IS_FREE)
#define COUNTED(j) HOLDS(j)
#else
#define COUNTED(j) TAKEN(j)
#endif
#define ROOM       (SUM(COUNTED) < LIMIT)

/* An attempt that has an end, or a tombstone, is not begun again. */
#ifdef BUG_ENDED_IS_NEW
#define NEW(i) (ticket[i] == none)
#else
#define NEW(i) (ticket[i] == none && row[i] == absent)
#endif

/* What a holder checks right before it dispatches. */
#ifdef BUG_NO_RECHECK
#define VALID(i) true
#else
#define VALID(i) (trust[OWNER(i)] && !hard[i])
#endif

/* When a settlement leaves the slot in quarantine. */
#if defined(BUG_CANCEL_FREES)
#define KEEPS(state, proof) (!proof && state != unknown)
#elif defined(BUG_CORRECTION_FREES)
#define KEEPS(state, proof) (!proof && state == unknown)
#else
#define KEEPS(state, proof) (!proof)
#endif

/* What becomes of a slot whose owner's heartbeat was lost. */
#ifdef BUG_HEARTBEAT_FREES
#define ORPHANED none
#else
#define ORPHANED quarantined
#endif

/* A grant that returns to the queue though somebody waits for it is one of the faults: its process is slow. */
#ifdef BUG_GRANT_BOUNCES
#define PRICE 0
#else
#define PRICE 1
#endif

/* When the window of a quarantine may be over. */
#ifdef BUG_WINDOW_FROM_LAPSE
#define ENDED(i) (!fresh[OWNER(i)] || (!running[i] && (hard[i] || closed[i])))
#else
#define ENDED(i) (!running[i] && (hard[i] || closed[i]))
#endif

/* Every change of a ticket's row comes through here: no backward edge, one lease for ever, the ended stay ended. */
inline move(i, to) {
    assert(to != queued || ticket[i] == none || ticket[i] == granted);
    assert(to != granted || ticket[i] == queued);
    assert(to != occupied || ticket[i] == none || ticket[i] == queued || ticket[i] == granted);
    assert(to != quarantined || HOLDS(i));
    assert(to == none || to == quarantined || (!leased[i] && !buried[i]));
    leased[i] = leased[i] || to == occupied;
    ticket[i] = to;
    assert(SUM(TAKEN) <= LIMIT);
    assert(!running[i] || HOLDS(i))
}

/* The guarded transition of an attempt's row, and the counters with it. `live`: its ticket holds a slot. */
inline account(i, state) {
    if
    :: row[i] == absent && live -> row[i] = state; settled[i]++; charges[i] = charges[i] + (state == charged)
    :: row[i] == unknown && (state == charged || state == zero) ->
        row[i] = state; corrected[i]++; charges[i] = charges[i] + (state == charged)
    :: else ->
#ifdef BUG_REPLAY_CHARGES
        charges[i] = charges[i] + (state == charged)
#else
        skip
#endif
    fi;
    assert(settled[i] <= 1 && corrected[i] <= 1 && charges[i] <= 1);
    assert(state != charged || dispatched[i])
}

/* One acquire commits: replay, ended, lapsed, or new: granted at once where there is room, else queued. */
inline acquire(i) {
    if
    :: NEW(i) && fresh[OWNER(i)] && ROOM -> move(i, occupied)
    :: NEW(i) && fresh[OWNER(i)] && !ROOM -> move(i, queued)
    :: else
    fi
}

/* One settlement commits. `proof`: the ending is confirmed or not dispatched; else it is uncertain. */
inline settle(i, state, proof) {
    live = HOLDS(i);
    account(i, state);
    if
    :: live && KEEPS(state, proof) -> move(i, quarantined)
    :: live && !(KEEPS(state, proof)) -> move(i, none)
    :: else
    fi
}

/* A ticket is taken back before its dispatch, and a tombstone stops what is still on its way. */
inline abandon(i) {
    assert(!dispatched[i]);
    if
    :: ticket[i] == quarantined
    :: else ->
        live = ticket[i] == occupied;
        if
        :: live -> account(i, zero)
#ifndef BUG_NO_TOMBSTONE
        :: !live && row[i] == absent -> row[i] = zero
#endif
        :: else
        fi;
        buried[i] = true;
        move(i, none)
    fi
}

/* Forgets what can have no effect any more, so that states that differ only in it are one. Nothing of a request left:
   every dispatched attempt has its one end, and an acknowledged charge was counted once. */
inline tidy(i) {
    if
    :: !HOLDS(i) && client[i] != holding -> hard[i] = false
    :: else
    fi;
    if
    :: (!HOLDS(i) && client[i] != streaming && client[i] != reporting) || hard[i] -> closed[i] = false
    :: else
    fi;
    if
    :: reports[i] == 0 && (client[i] == done || client[i] == dead) -> said[i] = absent; proven[i] = false
    :: else
    fi;
    if
    :: ticket[i] == none && !running[i] && acquires[i] == 0 && reports[i] == 0 && !stale[i] &&
       (client[i] == done || client[i] == dead) ->
        assert(!dispatched[i] || row[i] != absent);
        assert(!promised[i] || (row[i] == charged && charges[i] == 1));
        row[i] = absent; dispatched[i] = false; leased[i] = false; buried[i] = false;
        settled[i] = 0; corrected[i] = 0; charges[i] = 0; promised[i] = false;
        client[i] = over
    :: else
    fi
}

proctype Request(byte i) {
end:
    do
    /* THE CLIENT. Requests of one owner are alike: they begin in order. */
    :: d_step { client[i] == idle && (i < PROCS || client[i - PROCS] != idle) ->
           if
           :: trust[OWNER(i)] -> acquires[i] = 1; client[i] = asking
           :: else -> client[i] = over
           fi }

    /* The acquire is answered by the store below. Its acknowledgement may be lost: the same ticket again, or given up. */
    :: d_step { client[i] == asking && acquires[i] == 0 -> acquires[i] = 1 }
    :: d_step { client[i] == asking && acquires[i] == 1 && faults > 0 -> faults--; acquires[i] = 2 }
    :: d_step { client[i] == asking -> client[i] = abandoning }

    /* In the queue: granted in a transaction of its own process, or by another's and confirmed; or it stops waiting. */
    :: d_step { client[i] == waiting && ticket[i] == occupied -> client[i] = holding }
    :: d_step { client[i] == waiting && (ticket[i] == none || ticket[i] == quarantined) -> client[i] = done; tidy(i) }
    :: d_step { client[i] == waiting && ticket[i] == granted && fresh[OWNER(i)] -> move(i, occupied); client[i] = holding; tidy(i) }
    :: d_step { (client[i] == waiting || client[i] == abandoning) && ticket[i] == granted && fresh[OWNER(i)] && faults > 0 ->
           faults--; move(i, occupied); tidy(i) }
    :: d_step { client[i] == waiting -> client[i] = abandoning }
#ifdef BUG_UNCONFIRMED_DISPATCH
    :: d_step { client[i] == waiting && ticket[i] == granted -> client[i] = holding }
#endif
#ifdef BUG_CONFIRM_UNGUARDED
    :: d_step { client[i] == waiting && ticket[i] == queued && fresh[OWNER(i)] -> move(i, occupied); client[i] = holding }
#endif

    /* Holding a lease: the recheck, and the dispatch right behind it. */
    :: d_step { client[i] == holding && VALID(i) ->
           assert(!dispatched[i]);
           assert(!buried[i]);
           dispatched[i] = true; running[i] = true; client[i] = streaming;
           assert(SUM(RUNS) <= LIMIT);
           assert(ticket[i] == occupied && row[i] == absent) }
    :: d_step { client[i] == holding -> said[i] = zero; proven[i] = true; reports[i] = 1; client[i] = reporting; tidy(i) }

    /* Streaming: the terminal is seen, so the provider has ended; anything else is uncertain. */
    :: d_step { client[i] == streaming ->
           running[i] = false; said[i] = charged; proven[i] = true; reports[i] = 1; client[i] = reporting; tidy(i) }
    :: d_step { client[i] == streaming -> said[i] = unknown; closed[i] = STOPS(i); reports[i] = 1; client[i] = reporting; tidy(i) }

    /* The settlement: repeated until acknowledged. An unknown one may be corrected later, with or without proof. */
    :: d_step { client[i] == reporting && reports[i] == 0 -> reports[i] = 1 }
    :: d_step { client[i] == reporting && reports[i] == 1 && faults > 0 -> faults--; reports[i] = 2 }
    :: d_step { client[i] == reported ->
           stale[i] = reports[i] > 0; said[i] = charged; proven[i] = !running[i]; reports[i] = 1; client[i] = reporting }
    :: d_step { client[i] == reported -> client[i] = done; tidy(i) }

    /* Given up: repeated until acknowledged. */
    :: d_step { client[i] == abandoning && faults > 0 && ticket[i] != quarantined && row[i] == absent -> faults--; abandon(i); tidy(i) }
    :: d_step { client[i] == abandoning -> abandon(i); client[i] = done; tidy(i) }

    /* THE STORE: commits of what was sent, and the reconciliation, which any transaction runs and which may come late. */

    /* An acquire commits, and is answered; or nobody hears of it; or it never arrives. */
    :: d_step { acquires[i] > 0 ->
           acquires[i]--; acquire(i);
           if
           :: client[i] != asking
           :: client[i] == asking && ticket[i] == occupied -> client[i] = holding
           :: client[i] == asking && (ticket[i] == queued || ticket[i] == granted) -> client[i] = waiting
           :: else -> client[i] = done
           fi;
           tidy(i) }
    :: d_step { acquires[i] > 0 && client[i] == asking && faults > 0 -> faults--; acquires[i]--; acquire(i); tidy(i) }
    :: d_step { acquires[i] > (client[i] == asking) -> acquires[i]--; tidy(i) }

    /* A settlement likewise. */
    :: d_step { reports[i] > 0 ->
           reports[i]--; settle(i, said[i], proven[i]);
           if
           :: client[i] == reporting && said[i] == unknown -> client[i] = reported
           :: client[i] == reporting && said[i] != unknown -> promised[i] = said[i] == charged; client[i] = done
           :: else
           fi;
           tidy(i) }
    :: d_step { reports[i] > 0 && client[i] == reporting && faults > 0 ->
           faults--; reports[i]--; settle(i, said[i], proven[i]); tidy(i) }
    :: d_step { reports[i] > (client[i] == reporting) -> reports[i]--; tidy(i) }
    :: d_step { stale[i] -> stale[i] = false; settle(i, unknown, false); tidy(i) }

    /* The queue advances, in a transaction of the ticket's own process, or of another. */
    :: d_step { ticket[i] == queued && fresh[OWNER(i)] && ROOM -> move(i, occupied); tidy(i) }
    :: d_step { ticket[i] == queued && fresh[OWNER(i)] && ROOM -> move(i, granted) }

    /* A waiter past its deadline, or of a dead owner: nobody waits for it any more, or its process is slow. */
    :: d_step { ticket[i] == queued && (client[i] != waiting || !fresh[OWNER(i)]) -> move(i, none); tidy(i) }
    :: d_step { ticket[i] == queued && client[i] == waiting && faults > 0 -> faults--; move(i, none) }
    /* A grant that was not confirmed: back in the queue, or over with its owner or its deadline. */
#ifndef BUG_GRANT_NEVER_RETURNS
    :: d_step { ticket[i] == granted && fresh[OWNER(i)] && faults >= PRICE -> faults = faults - PRICE; move(i, queued) }
    :: d_step { ticket[i] == granted && (client[i] != waiting || !fresh[OWNER(i)]) -> move(i, none); tidy(i) }
#endif
    /* An attempt that outlived its deadline or its owner. */
    :: d_step { ticket[i] == occupied && !fresh[OWNER(i)] -> live = true; account(i, unknown); move(i, ORPHANED); tidy(i) }
    :: d_step { ticket[i] == occupied && fresh[OWNER(i)] && hard[i] -> move(i, quarantined) }
    /* Quarantine that has passed. */
#ifndef BUG_QUARANTINE_FOR_EVER
    :: d_step { ticket[i] == quarantined && ENDED(i) ->
           live = true;
           if
#ifndef BUG_LOST_UNSETTLED
           :: row[i] == absent -> account(i, unknown)
#endif
           :: else
           fi;
           move(i, none); tidy(i) }
#endif

    /* TIME AND THE PROVIDER. A remote end has ended when hard deadline and isolation have passed, or when its connection
       was closed and that is known to stop it. Its end shows nowhere before somebody sees it or the slot depends on it. */

    :: d_step { HOLDS(i) && !hard[i] -> hard[i] = true; tidy(i) }
    :: d_step { running[i] && (client[i] != streaming || ticket[i] == quarantined) -> running[i] = false; tidy(i) }
    od
}

/* Heartbeats and deaths. A lapsed owner is never trusted again; its process goes on under another one. */
proctype Owner(byte p) {
end:
    do
    :: d_step { trust[p] && faults > 0 -> faults--; trust[p] = false }
    :: d_step { trust[p] && faults > 0 ->
           faults--; trust[p] = false; k = p;
           do
           :: k < N ->
               if
               :: client[k] != over -> client[k] = dead; tidy(k)
               :: else
               fi;
               k = k + PROCS
           :: else -> break
           od;
           skip }
    :: d_step { !trust[p] && fresh[p] -> fresh[p] = false }
#ifdef BUG_OWNER_REVIVES
    :: d_step { !trust[p] && !fresh[p] && faults > 0 -> faults--; trust[p] = true; fresh[p] = true }
#endif
    od
}

/* Liveness: the last line must have been passed wherever everything has stopped; and nothing goes round in circles. */
init {
    atomic {
        byte j = 0;
        do
        :: j < N -> run Request(j); j++
        :: else -> break
        od;
        j = 0;
        do
        :: j < PROCS -> run Owner(j); j++
        :: else -> break
        od
    }
    SUM(OVER) == N
}
