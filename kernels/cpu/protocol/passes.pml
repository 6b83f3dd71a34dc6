/* All-reduce in passes behind flags: one-shot and two-shot messages through the same slots and counters, in any order.
 *
 * Every rank owns four slots of data, four of results and the counters `arrive` and `done`; it alone writes them. A
 * message is a series of passes, numbered on from message to message. Pass p copies the data to the own slot p % 4,
 * publishes arrive = p, waits for arrive >= p of all and then
 *   one-shot: reads everybody's slot. Within a message pass p + 1 (not p + 2) may be copied and published before the
 *             wait for pass p.
 *   two-shot: reads the own part of everybody's slot, writes the own result p % 4, publishes done = p, waits for
 *             done >= p of all and reads everybody's result. Nothing is copied ahead.
 *
 * Claim: whatever is read at pass p is of pass p; nobody waits for ever.
 *
 * Method: one word a part, every store a step of its own. What a rank reads between two of its stores or waits it reads
 * in one step: reading changes nothing, and as that step comes at any moment between, so does the read of each word.
 * The data of a pass is its number. The first rank to read at a pass chooses the kind of that pass for all. Messages
 * are not modelled: a rank copies ahead or not as it likes, before two-shot passes too, which allows whatever messages
 * of any length do, and more.
 *
 * With LOOKAHEAD passes copied ahead, a rank about to copy pass p knows that everybody has finished pass
 * p - 2 * LOOKAHEAD - 2, and no later one: 2 * LOOKAHEAD + 2 slots it takes. -DSLOTS and -DLOOKAHEAD set other numbers.
 *
 * -DFAULT=1: three slots
 * -DFAULT=2: two passes copied ahead
 * -DFAULT=3: arrive published before the copy
 * -DFAULT=4: done published before the result is written
 * -DFAULT=5: no wait for done
 */
#if FAULT == 1
#define SLOTS 3
#elif FAULT == 2
#define LOOKAHEAD 2
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#ifndef LOOKAHEAD
#define LOOKAHEAD 1
#endif
#if SLOTS > 2 * LOOKAHEAD + 1
#define MODULUS (2 * SLOTS)
#else
#define MODULUS (4 * SLOTS)
#endif
#include "common.pml"
#include "flags.pml"

#define slot(rank, pass, part) slots[((rank) * SLOTS + (pass) % SLOTS) * RANKS + (part)]
#define result(rank, pass) results[(rank) * SLOTS + (pass) % SLOTS]

mtype = { UNKNOWN, ONE_SHOT, TWO_SHOT };
mtype kind[MODULUS] = UNKNOWN;
byte slots[RANKS * SLOTS * RANKS];
byte results[RANKS * SLOTS];

/* All have arrived at the pass, so have finished pass - LOOKAHEAD - 1: the kind of that one can be forgotten. */
inline choose_kind() {
    if
    ::  kind[pass] == UNKNOWN -> kind[pass] = ONE_SHOT;
    ::  kind[pass] == UNKNOWN -> kind[pass] = TWO_SHOT;
    ::  else
    fi
    kind[later(pass, -LOOKAHEAD - 1)] = UNKNOWN;
}

inline copy() {
    sent = later(sent, 1);
#if FAULT == 3
    flag[_pid].arrive = sent;
#endif
    for (part : 0 .. RANKS - 1) {
        slot(_pid, sent, part) = sent;
    }
    flag[_pid].arrive = sent;
}

inline read_slots(first, last) {
    for (peer : 0 .. RANKS - 1) {
        for (part : first .. last) {
            assert(slot(peer, pass, part) == pass);
        }
    }
}

/* The code leaves results and done alone. Nobody reads them at this pass; without it they would lag without limit. */
inline keep_up() {
    result(_pid, pass) = pass;
    flag[_pid].done = pass;
}

inline publish_result() {
#if FAULT == 4
    flag[_pid].done = pass;
#endif
    result(_pid, pass) = pass;
    flag[_pid].done = pass;
}

inline read_results() {
    for (peer : 0 .. RANKS - 1) {
        assert(result(peer, pass) == pass);
    }
}

active [RANKS] proctype rank() {
    byte sent, pass = 1, peer, part; /* the last pass copied, the next to finish */
    do
    ::  later(sent, 1 - pass) <= LOOKAHEAD ->
        copy();
    ::  sent != later(pass, -1) ->
        atomic { wait(arrive, pass); choose_kind(); }
        if
        ::  atomic { kind[pass] == ONE_SHOT -> read_slots(0, RANKS - 1); keep_up(); pass = later(pass, 1); }
        ::  atomic { kind[pass] == TWO_SHOT -> read_slots(_pid, _pid); }
            publish_result();
#if FAULT != 5
            atomic { wait(done, pass); }
#endif
            atomic { read_results(); pass = later(pass, 1); }
        fi
    od
}
