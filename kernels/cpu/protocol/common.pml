/* What the models have in common: how many ranks, which fault is seeded, and counters without end in few states.
 *
 * Every model is one process a rank, for ever. An assertion that fails is data of the wrong call; a state in which
 * nobody can move is a deadlock. By hand, from an empty directory:
 *     spin -a -DRANKS=3 -DFAULT=1 MODEL.pml && gcc -O1 -DSAFETY -o pan pan.c && ./pan -m3000000
 *     spin -t -p -DRANKS=3 -DFAULT=1 MODEL.pml        (the steps that lead to the error)
 *
 * Counters live modulo MODULUS, which each model sets to more than twice what can lie between two ranks, and are
 * compared by the sign of their difference, as unsigned words that wrap are.
 *
 * Memory is sequentially consistent. x86 (TSO) keeps the order of stores and that of loads too, but a load may overtake
 * an earlier store to another word. That is not modelled: a rank whose stores lag seems to be slower than it is, and
 * its peers wait for it.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef FAULT
#define FAULT 0
#endif

#define later(counter, steps) (((counter) + (steps) + MODULUS) % MODULUS)
#define reached(counter, goal) (((counter) - (goal) + MODULUS) % MODULUS < MODULUS / 2)
