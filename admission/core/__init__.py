"""
The rules of admission, pure: `admission.decision` applies them to a state.

    work       a state that is being changed, and the terms that all rules share
    reconcile  a group is brought up to now
    acquire    demands are sifted (`demands`), slots are granted (`grants`), the rest waits
    keys       what its key has left for a demand
    confirm    an owner takes what others granted to it
    settle     tickets end; `judge` says what an outcome means for its group
    owners     who lives, and what is due
    groups     configuration, reset, closing

The SQL is cut in the same way: sql/functions has a file for each. `occupancy`, `floors`, `fences` and `rows` are what
several of them count, look up and tell.
"""
