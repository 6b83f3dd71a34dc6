/* Lamport one-shot all-reduce: the data itself says that it has come, since no word of it is the sentinel.
 *
 * Every rank owns three buffers, which it alone writes and its peers read; at first they hold the sentinel. At call c
 * a rank (a) writes its data to its buffer c % 3, (b) fills the second half of its buffer (c - 2) % 3 with the sentinel,
 * (c) polls every rank's buffer c % 3, word after word, until it is no sentinel, (d) fills the first half of its buffer
 * (c - 1) % 3 with the sentinel: the other half waits for the next call. A peer one call ahead may already poll what is
 * filled at (b), but not before its first half has been written.
 *
 * Claim: what is polled at call c is data of call c; no word is written while a rank has still to read what it holds;
 * nobody waits for ever.
 *
 * Method: two words a buffer, every load and store a step of its own. The data of a call is its number. `finished` is
 * no part of the protocol: it states the second claim. By that claim the model need not load a word again that once was
 * no sentinel: code that does, with the words still to come, finds the same.
 *
 * -DFAULT=1: both halves are filled at (b)
 * -DFAULT=2: (d) is done to the buffer just used, c % 3
 * -DFAULT=3: (b) is left out
 * -DFAULT=4: (d) comes before (c)
 */
#define BUFFERS 3
#define MODULUS (2 * BUFFERS)
#include "common.pml"
#define WORDS 2
#define SENTINEL 255

#define word(rank, call, w) memory[((rank) * BUFFERS + (call) % BUFFERS) * WORDS + (w)]

byte memory[RANKS * BUFFERS * WORDS] = SENTINEL;
byte finished[RANKS]; /* calls of which a rank has polled everything */

/* Stores `value` to a word of the own buffer at call `at`, which so far holds what is of call `before`. */
inline write(at, before, value) {
    d_step {
        for (peer : 0 .. RANKS - 1) {
            assert(peer == _pid || reached(finished[peer], later(before, 1)));
        }
        word(_pid, at, w) = value;
    }
}

active [RANKS] proctype rank() {
    byte call, peer, from, w;
    do
    ::  for (w : 0 .. WORDS - 1) {
            write(call, later(call, -BUFFERS), call);
        }
#if FAULT == 1
        w = 0;
        write(later(call, -2), later(call, -2), SENTINEL);
#endif
#if FAULT != 3
        w = 1;
        write(later(call, -2), later(call, -2), SENTINEL);
#endif
#if FAULT == 4
        w = 0;
        write(later(call, -1), later(call, -1), SENTINEL);
#endif
        for (w : 0 .. WORDS - 1) {
            for (from : 0 .. RANKS - 1) {
                d_step { word(from, call, w) != SENTINEL -> assert(word(from, call, w) == call); }
            }
        }
        finished[_pid] = later(call, 1);
#if FAULT == 2
        w = 0;
        write(call, call, SENTINEL);
#elif FAULT != 4 && FAULT != 1
        w = 0;
        write(later(call, -1), later(call, -1), SENTINEL);
#endif
        call = later(call, 1);
    od
}
