/* Two counters a rank, which it alone writes and never lowers, and the wait until those of all ranks reach `goal`. */
typedef flags {
    byte arrive;
    byte done;
}
flags flag[RANKS];

#define wait(counter, goal) for (peer : 0 .. RANKS - 1) { reached(flag[peer].counter, goal); }
