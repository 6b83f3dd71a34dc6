/* Two-shot all-reduce in place, in memory that every rank can write: nothing is copied, all of x ends as the sum.
 *
 * Call c publishes arrive = c and waits for arrive >= c of all. Rank r reads part r of everybody's x, writes the sum to
 * part r of everybody's x, publishes done = c and waits for done >= c of all. Then it returns, and the caller may
 * overwrite its x at once.
 *
 * Claim: no part is read after anybody has overwritten it; on return all of x is the sum; nobody waits for ever.
 *
 * Method: one word a part, every load and store a step of its own; the caller overwrites x word by word between calls.
 * DATA(c) and SUM(c) stand for the data of call c and for its sum.
 *
 * -DFAULT=1: no wait for done
 * -DFAULT=2: no wait for arrive
 * -DFAULT=3: done published before the sums are written
 * -DFAULT=4: arrive published after the wait for it, a deadlock
 */
#define MODULUS 4
#include "common.pml"
#include "flags.pml"

#define DATA(call) (2 * (call))
#define SUM(call) (2 * (call) + 1)
#define x(rank, part) memory[(rank) * RANKS + (part)]

byte memory[RANKS * RANKS];

active [RANKS] proctype rank() {
    byte call = 1, peer, part;
    do
    ::  for (part : 0 .. RANKS - 1) {
            x(_pid, part) = DATA(call);
        }
#if FAULT != 4
        flag[_pid].arrive = call;
#endif
#if FAULT != 2
        wait(arrive, call);
#endif
        flag[_pid].arrive = call;
        for (peer : 0 .. RANKS - 1) {
            assert(x(peer, _pid) == DATA(call));
        }
#if FAULT == 3
        flag[_pid].done = call;
#endif
        for (peer : 0 .. RANKS - 1) {
            x(peer, _pid) = SUM(call);
        }
        flag[_pid].done = call;
#if FAULT != 1
        wait(done, call);
#endif
        for (part : 0 .. RANKS - 1) {
            assert(x(_pid, part) == SUM(call));
        }
        call = later(call, 1);
    od
}
