/* Lamport one-shot all-reduce: the data itself says that it has come, since no word of it is the sentinel.
 *
 * Every rank owns three buffers, which it alone writes and its peers read; at first they hold the sentinel. At call c
 * a rank (a) writes its data to its buffer c % 3, (b) polls every rank's buffer c % 3 until no word is the sentinel,
 * (c) fills its buffer (c - 1) % 3 with the sentinel: that buffer is next written at call c + 2.
 *
 * Claim: what is polled at call c is data of call c; no word is written while a rank has still to read what it holds;
 * nobody waits for ever.
 *
 * Method: two words a buffer, every load and store a step of its own. The data of a call is its number. `finished` is
 * no part of the protocol: it states the second claim. By that claim the model need not load a word again that once was
 * no sentinel: code that does, with the words still to come, finds the same.
 *
 * -DFAULT=1: (c - 2) % 3 is filled between (a) and (b): a peer one call ahead may already poll it
 * -DFAULT=2: the buffer just used, c % 3, is filled at the end of the call
 * -DFAULT=3: nothing is filled
 */
#define BUFFERS 3
#define MODULUS (2 * BUFFERS)
#include "common.pml"
#define WORDS 2
#define SENTINEL 255

#define word(rank, call, w) memory[((rank) * BUFFERS + (call) % BUFFERS) * WORDS + (w)]

byte memory[RANKS * BUFFERS * WORDS] = SENTINEL;
byte finished[RANKS]; /* calls of which a rank has polled everything */

/* Stores `value` to every word of the own buffer at call `at`, which so far holds what is of call `before`. */
inline fill(at, before, value) {
    for (w : 0 .. WORDS - 1) {
        d_step {
            for (peer : 0 .. RANKS - 1) {
                assert(peer == _pid || reached(finished[peer], later(before, 1)));
            }
            word(_pid, at, w) = value;
        }
    }
}

active [RANKS] proctype rank() {
    byte call, peer, w;
    do
    ::  fill(call, later(call, -BUFFERS), call);
#if FAULT == 1
        fill(later(call, -2), later(call, -2), SENTINEL);
#endif
        for (peer : 0 .. RANKS - 1) {
            for (w : 0 .. WORDS - 1) {
                d_step { word(peer, call, w) != SENTINEL -> assert(word(peer, call, w) == call); }
            }
        }
        finished[_pid] = later(call, 1);
#if FAULT == 0
        fill(later(call, -1), later(call, -1), SENTINEL);
#elif FAULT == 2
        fill(call, call, SENTINEL);
#endif
        call = later(call, 1);
    od
}
