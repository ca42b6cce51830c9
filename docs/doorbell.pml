/* The doorbell's protocol, src/muster/_core/doorbell.hpp, as a model for spin: a caller rings two workers and waits for
 * both, round after round; one of the workers may be killed between any two of its statements, and is replaced.
 *
 * Checked in every interleaving: no process sleeps forever (a lost wake-up is an invalid end state), and every round
 * ends with each worker's answer counted once.
 *
 * Stores are not visible at once: each of them waits in a buffer until the "memory" process, or a fence of its writer,
 * carries it out. That is more freedom than x86 and less than ARM; the fences are there for this. With NO_FENCE
 * the same model has to fail, which shows that the check can find an error.
 *
 *     apt-get install spin
 *     cd $(mktemp -d) && spin -a <here>/doorbell.pml && gcc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
 *     spin -DNO_FENCE -a <here>/doorbell.pml && gcc -O2 -DSAFETY -o pan pan.c && ./pan -m100000   # must find an error
 *
 * tests/faults/test_doorbell_model.py does both.
 *
 * A ring asks for one step here. Where it asks for several and all of them are awaited, the answers before the last are
 * stores to `finished` that nobody waits for; the last answer is announced as here. There a worker looks whether each of
 * the others has answered all that it was asked for, instead of at their sum; of two workers that is the same.
 *
 * Left out: how long a wait stays awake (any number of looks, here), counters that wrap, and the slice that
 * bounds the caller's sleep. The model ends a slice only once a worker is dead, since a slice that ends by itself would
 * hide every lost wake-up.
 */
#define WORKERS 2
#define ROUNDS 2

#ifdef NO_FENCE
#define FENCE_CALLER skip
#define FENCE_WORKER(w) skip
#else
#define FENCE_CALLER atomic { !rung_waits[0] && !rung_waits[1] && !target_waits && !armed_waits }
#define FENCE_WORKER(w) atomic { !asleep_waits[w] && !finished_waits[w] }
#endif

/* The words of memory that both sides see, and for each the store that is not visible yet. */
byte rung[WORKERS], rung_next[WORKERS];
bool rung_waits[WORKERS];
bool asleep[WORKERS], asleep_next[WORKERS], asleep_waits[WORKERS];
byte finished[WORKERS], finished_next[WORKERS];
bool finished_waits[WORKERS];
byte target, target_next;
bool target_waits;
bool armed, armed_next, armed_waits;

/* The kernel's part: who sleeps on a futex, who has been killed. */
bool worker_sleeps[WORKERS], caller_sleeps;
bool killed[WORKERS], dead[WORKERS];
bool over;

#define TOTAL (finished[0] + finished[1])
#define STORE(name, value) atomic { !name##_waits; name##_next = value; name##_waits = true }
#define STORE_AT(name, at, value) atomic { !name##_waits[at]; name##_next[at] = value; name##_waits[at] = true }
#define LAND(name) atomic { name##_waits -> name = name##_next; name##_waits = false }
#define LAND_AT(name, at) atomic { name##_waits[at] -> name[at] = name##_next[at]; name##_waits[at] = false }

active proctype memory() {
end:
    do
       /* A release store: all earlier stores land before it. */
    :: atomic { rung_waits[0] && !target_waits -> rung[0] = rung_next[0]; rung_waits[0] = false }
    :: atomic { rung_waits[1] && !target_waits -> rung[1] = rung_next[1]; rung_waits[1] = false }
    :: LAND_AT(asleep, 0)
    :: LAND_AT(asleep, 1)
    :: LAND_AT(finished, 0)
    :: LAND_AT(finished, 1)
    :: LAND(target)
       /* A release store, too. */
    :: atomic { armed_waits && !target_waits -> armed = armed_next; armed_waits = false }
    od
}

inline wake_caller_if_done(w) {
    if
    :: !armed || TOTAL < target -> skip
    :: armed && TOTAL >= target ->
       /* An exchange acts on memory itself, and all earlier stores have landed. */
       atomic {
           !finished_waits[w] && !asleep_waits[w];
           if
           :: armed -> armed = false; caller_sleeps = false
           :: else -> skip
           fi
       }
    fi
}

/* Serves all requests: as many answers as rings. `mine` is the last value that the worker has stored, landed or not. */
proctype worker(byte w) {
    byte seen, mine;
    {
        mine = finished[w];
        do
        :: seen = rung[w];
           if
           :: mine != seen ->
              /* announce_finished */
              mine = mine + 1;
              STORE_AT(finished, w, mine);
              FENCE_WORKER(w);
              wake_caller_if_done(w)
           :: else ->
              /* wait_for_ring, once the worker is no longer awake */
              if
              :: rung[w] != seen -> skip
              :: else ->
                 STORE_AT(asleep, w, true);
                 FENCE_WORKER(w);
                 if
                 :: rung[w] == seen ->
                    atomic {
                        if
                        :: rung[w] == seen -> worker_sleeps[w] = true
                        :: else -> skip
                        fi
                    };
                    !worker_sleeps[w]
                 :: rung[w] != seen -> skip
                 fi;
                 STORE_AT(asleep, w, false)
              fi
           fi
        od
    } unless { killed[w] || over };
    atomic {
        worker_sleeps[w] = false;
        dead[w] = killed[w]
    }
}

active proctype killer() {
    if
    :: killed[0] = true
    :: killed[1] = true
    :: skip
    fi
}

/* Recovery::lose_host, called once the death is noticed: the steps that the dead worker owed count as finished, and a
 * new worker takes over. */
inline replace(w) {
    atomic {
        /* The process is gone: all its stores have landed. */
        !finished_waits[w] && !asleep_waits[w] && !rung_waits[w];
        asleep[w] = false;
        finished[w] = rung[w];
        killed[w] = false;
        dead[w] = false
    };
    run worker(w)
}

active proctype caller() {
    byte round = 0, w;
    atomic { run worker(0); run worker(1) };
    do
    :: round < ROUNDS ->
       round = round + 1;
       /* ring_all */
       STORE_AT(rung, 0, round);
       STORE_AT(rung, 1, round);
       FENCE_CALLER;
       w = 0;
       do
       :: w < WORKERS ->
          if
          :: asleep[w] -> worker_sleeps[w] = false
          :: !asleep[w] -> skip
          fi;
          w = w + 1
       :: else -> break
       od;
       /* wait_for_finished, slice after slice */
       do
       :: TOTAL == round * WORKERS -> break
       :: else ->
          STORE(target, round * WORKERS);
          STORE(armed, true);
          FENCE_CALLER;
          if
          :: TOTAL == round * WORKERS -> skip
          :: TOTAL != round * WORKERS ->
             atomic {
                 if
                 :: armed -> caller_sleeps = true
                 :: else -> skip
                 fi
             };
             if
             :: !caller_sleeps -> skip
             :: dead[0] || dead[1] -> caller_sleeps = false
             fi
          fi;
          STORE(armed, false);
          if
          :: dead[0] -> replace(0)
          :: dead[1] -> replace(1)
          :: else -> skip
          fi
       od;
       assert(TOTAL == round * WORKERS)
    :: else -> break
    od;
    over = true
}
