/*
 * The breaker of one capacity group, and a floor under it. `__main__.py` says what is left out.
 *
 * ATTEMPTS requests come one after the other into LIMIT slots. Each step is one transaction of the store, one act of a
 * client, or of time. Results come as late as they like: an attempt that was granted in one generation may be reported
 * in any later one. FAULTS bounds lapses, slow processes and repeated settlements.
 */

#ifndef LIMIT
#define LIMIT 4
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 6
#endif
#ifndef THRESHOLD
#define THRESHOLD 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#define NOBODY LIMIT
/* How many ticks of time the longest Retry-After takes. */
#define LONGEST 2

mtype = { closed, open, half_open }
/* A slot: `offered` is a grant that its owner has still to confirm; `streaming` has given its first content; `lapsed`
   is quarantined with its client still to report; `quarantined` has reported. */
mtype = { free, offered, held, waiting, streaming, lapsed, quarantined }
mtype = { answered, transient, rate_limited, nothing, not_dispatched }

mtype breaker = closed;
byte generation = 1;
byte probe = NOBODY;
byte failures;
byte ramp;                /* 0: none */
byte floor;               /* ticks for which nothing is granted */

mtype slot[LIMIT] = free;
byte granted_in[LIMIT];   /* the generation of the grant */
byte left = ATTEMPTS;     /* requests that still wait to be granted */
byte faults = FAULTS;

/* What happened, for the properties alone. */
byte newest = 1;          /* the generation at the last change */
bool since[LIMIT];        /* granted since the breaker last opened */
bool period[LIMIT];       /* granted since the breaker last opened or closed */
bool trial[LIMIT];        /* an undecided probe */
byte evidence;            /* attempts of this closed period that failed within the window, each once */
byte answers = LIMIT;     /* complete answers since it closed, the probe's own aside; LIMIT: never opened */
byte asked;               /* ticks for which the provider asked to be left alone */

hidden byte k;

#define LIVE(j)    (slot[j] == offered || slot[j] == held || slot[j] == waiting || slot[j] == streaming)
#define SAME(j)    (LIVE(j) && granted_in[j] == generation)
#define RISING(j)  (LIVE(j) && period[j])
#define TRIAL(j)   (LIVE(j) && trial[j])
#define EMPTY(j)   (slot[j] == free)
#if LIMIT == 2
#define SUM(of)    (of(0) + of(1))
#elif LIMIT == 3
#define SUM(of)    (of(0) + of(1) + of(2))
#else
#define SUM(of)    (of(0) + of(1) + of(2) + of(3))
#endif

#ifdef BUG_TWO_PROBES
#define PLACE      true
#else
#define PLACE      (probe == NOBODY)
#endif
#if defined(BUG_OPEN_GRANTS)
#define GATE       (breaker != half_open || PLACE)
#else
#define GATE       (breaker == closed || (breaker == half_open && PLACE))
#endif
#ifdef BUG_NO_RAMP
#define RAMP       true
#else
#define RAMP       (ramp == 0 || SUM(SAME) < ramp)
#endif

/* Whether the result of an attempt may act on the breaker. */
#ifdef BUG_OLD_RESULTS_COUNT
#define CURRENT(i) true
#else
#define CURRENT(i) (granted_in[i] == generation)
#endif
#ifdef BUG_OLD_SUCCESS_CLOSES
#define DECIDES(i, v) (probe == i || v == answered)
#define REACHES(i, v) (CURRENT(i) || v == answered)
#elif defined(BUG_OLD_FAILURE_REOPENS)
#define DECIDES(i, v) (probe == i || v == transient)
#define REACHES(i, v) (CURRENT(i) || v == transient)
#else
#define DECIDES(i, v) (probe == i)
#define REACHES(i, v) CURRENT(i)
#endif

/* Every change of the breaker comes through here: the generation only grows. */
inline become(state) {
    breaker = state;
    probe = NOBODY;
#ifdef BUG_GENERATION_STAYS
    generation = generation + (state != half_open);
#else
    generation++;
#endif
    assert(generation > newest);
    newest = generation;
    failures = 0;
    evidence = 0
}

inline forget() {
    k = 0;
    do
    :: k < LIMIT ->
        period[k] = false; trial[k] = false;
        if
        :: breaker == open -> since[k] = false
        :: else
        fi;
        k++
    :: else -> break
    od
}

/* Opens it. An open one does not open again: no result can extend a cooldown. */
inline trip() {
    assert(breaker != open);
    assert(breaker != closed || evidence >= THRESHOLD);
    become(open);
    ramp = 0;
    forget()
}

/* Closes it: on the word of an attempt that was granted since it opened. */
inline shut(i) {
    assert(breaker == half_open && since[i]);
    become(closed);
    ramp = 1;
    answers = 0;
    forget()
}

/* What an outcome says. `first`: the settlement is applied, not a replay. */
inline judge(i, verdict, ticks, first) {
    if
    :: verdict == rate_limited ->
        if
        :: ticks > asked -> asked = ticks
        :: else
        fi;
#ifdef BUG_FLOOR_LOWERED
        floor = ticks
#else
        if
        :: ticks > floor -> floor = ticks
        :: else
        fi
#endif
    :: else
    fi;
    if
    :: !(REACHES(i, verdict))
    :: else ->
        if
        :: breaker == closed && verdict == transient ->
            failures++;
            evidence = evidence + (first && period[i]);
            if
            :: failures >= THRESHOLD -> trip()
            :: else
            fi
        :: breaker == closed && verdict == answered ->
            answers = answers + (answers < LIMIT && period[i]);
            if
            :: ramp == 0
            :: ramp > 0 && ramp * 2 >= LIMIT -> ramp = 0
            :: ramp > 0 && ramp * 2 < LIMIT -> ramp = ramp * 2
            fi
        :: breaker == half_open && DECIDES(i, verdict) ->
            if
            :: verdict == answered || verdict == rate_limited -> shut(i)
#ifndef BUG_CANCELLED_PROBE_OPENS
            :: verdict == not_dispatched -> become(half_open)
#endif
            :: else -> assert(probe == i && verdict != not_dispatched); trip()
            fi
        :: else
        fi
    fi
}

/* A slot is freed. What it says of its past has no effect any more. */
inline leave(i) {
    slot[i] = free; granted_in[i] = 0; since[i] = false; period[i] = false; trial[i] = false
}

/* A grant of the present generation. */
inline grant(i) {
    granted_in[i] = generation;
    since[i] = true;
    period[i] = breaker == closed;
    trial[i] = breaker == half_open;
    if
    :: breaker == half_open -> probe = i
    :: else
    fi;
    assert(breaker != open);
    assert(asked == 0);
    assert(SUM(TRIAL) <= 1 && (SUM(TRIAL) == 0 || breaker == half_open));
    assert(breaker != closed || answers >= 2 || SUM(RISING) <= answers + 1)
}

/* By the rules as they stand, a confirmation asks whether the grant is still there, and not what the breaker has come to
   since. With FENCED it asks that too; STRICT then holds: nothing is dispatched into an open breaker or below a floor,
   not even what was granted before. */
#ifdef FENCED
#define CONFIRMABLE(i) (granted_in[i] == generation && floor == 0)
#else
#define CONFIRMABLE(i) true
#endif
inline confirmed() {
#ifdef STRICT
    assert(breaker != open);
    assert(asked == 0)
#else
    skip
#endif
}

#define REPORTS(i) (slot[i] == waiting || slot[i] == streaming || slot[i] == lapsed)

proctype Slot(byte i) {
end:
    do
    /* A grant, to a request of the transaction's own process or of another's. Free slots are alike: the first is taken. */
    :: d_step { slot[i] == free && (i == 0 || slot[i - 1] != free) && left > 0 && floor == 0 && GATE && RAMP ->
           left--; slot[i] = held; grant(i) }
    :: d_step { slot[i] == free && (i == 0 || slot[i - 1] != free) && left > 0 && floor == 0 && GATE && RAMP ->
           left--; slot[i] = offered; grant(i) }

    /* Its owner confirms it; or takes it back; or is too slow, and it waits again. */
    :: d_step { slot[i] == offered && CONFIRMABLE(i) -> slot[i] = held; confirmed() }
    :: d_step { slot[i] == offered -> leave(i) }
    :: d_step { slot[i] == offered && (faults > 0 || !(CONFIRMABLE(i))) ->
           faults = faults - (CONFIRMABLE(i)); left++; leave(i) }

    /* The recheck fails, or it is dispatched. The first content decides a probe. */
    :: d_step { slot[i] == held -> judge(i, not_dispatched, 0, true); leave(i) }
    :: d_step { slot[i] == held -> slot[i] = waiting }
    :: d_step { slot[i] == waiting ->
           slot[i] = streaming;
           if
           :: breaker == half_open && probe == i && granted_in[i] == generation -> shut(i)
           :: else
           fi;
           skip }

    /* The owner's heartbeat lapses, or the owner dies. */
    :: d_step { (slot[i] == held || slot[i] == waiting || slot[i] == streaming) && faults > 0 -> faults--; slot[i] = lapsed }

    /* It ends: an answer, a failure with or without proof of the end, a rate limit, an end that says nothing. */
    :: d_step { REPORTS(i) -> judge(i, answered, 0, true); leave(i) }
    :: d_step { REPORTS(i) -> judge(i, transient, 0, true); leave(i) }
    :: d_step { REPORTS(i) -> judge(i, transient, 0, true); slot[i] = quarantined }
    :: d_step { REPORTS(i) -> judge(i, rate_limited, 1, true); leave(i) }
    :: d_step { REPORTS(i) -> judge(i, rate_limited, LONGEST, true); leave(i) }
    :: d_step { REPORTS(i) -> judge(i, nothing, 0, true); slot[i] = quarantined }
    /* Or nothing is ever heard of it. */
    :: d_step { slot[i] == lapsed -> slot[i] = quarantined }
#ifdef BUG_REPLAY_COUNTS
    /* The acknowledgement of an uncertain failure was lost, and it is settled again. */
    :: d_step { slot[i] == quarantined && faults > 0 -> faults--; judge(i, transient, 0, false); skip }
#endif
    :: d_step { slot[i] == quarantined -> leave(i) }
    od
}

/* The reconciliation, and time. */
proctype Group() {
end:
    do
#if !defined(BUG_PROBE_FOR_EVER)
    :: d_step { breaker == half_open && probe != NOBODY && !LIVE(probe) -> trip(); skip }
#endif
    :: d_step { breaker == open -> become(half_open) }
    :: d_step { failures > 0 && breaker == closed -> failures = 0; evidence = 0 }
    :: d_step { floor > 0 || asked > 0 ->
           floor = floor - (floor > 0); asked = asked - (asked > 0) }
    od
}

init {
    atomic {
        byte j = 0;
        do
        :: j < LIMIT -> run Slot(j); j++
        :: else -> break
        od;
        run Group()
    }
    /* Liveness: every request has been served and every slot is free wherever everything has stopped. */
    left == 0 && SUM(EMPTY) == LIMIT && probe == NOBODY && breaker != open
}
